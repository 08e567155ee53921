"""Thoughts: text in tags, with which some models begin their answers."""

from __future__ import annotations

from typing import NamedTuple

from jaxgen.core.grammar.grammar import Grammar
from jaxgen.serving.formats.format import free_text


class Tags(NamedTuple):
    """The tags around a thought."""

    opening: str
    closing: str


# A model thinks if its chat template contains one of the tags of a pair.
PAIRS = (Tags("<think>", "</think>"), Tags("[THINK]", "[/THINK]"))


def tags_of(template: str | None) -> Tags | None:
    """Return the tags in a chat template, or None if the template has none."""
    return next((tags for tags in PAIRS if any(tag in (template or "") for tag in tags)), None)


def is_open(prompt: str, tags: Tags, beginning: str = "") -> bool:
    """Return True if an answer to `prompt` begins inside a thought; `beginning` is that of the answer, if any."""
    if beginning:
        return beginning.rfind(tags.opening) > beginning.rfind(tags.closing)
    return prompt.rstrip().endswith(tags.opening)


def before(tags: Tags, prompt: str, opened: bool) -> Grammar | None:
    """Return the grammar of the thought before a text that has a grammar, or None if no thought can follow.

    If the prompt opens the thought, it must be closed first. If the prompt ends with a closed thought, there is no
    other. Otherwise, the model decides whether it thinks.
    """
    if not opened and prompt.rstrip().endswith(tags.closing):
        return None
    rest = free_text(tags.closing) + tags.closing + Grammar.choice(["", "\n", "\n\n"])
    return rest if opened else (tags.opening + rest).repeat(0, 1)


class ThoughtParser:
    """Splits generated text that arrives in pieces into a thought and the content after it.

    The thought begins with the text if `opened` is True, or else with the opening tag, if only whitespace comes before
    it. Whitespace around the thought is dropped. The result does not depend on how the text is split.

        >>> parser = ThoughtParser(PAIRS[0], opened=False)
        >>> parser.put("<think>\\nA bird? </th"), parser.put("ink>\\n\\nA wren.")
        (('A bird?', ''), ('', 'A wren.'))

    Attributes:
        is_open: True inside the thought.
    """

    def __init__(self, tags: Tags, opened: bool):
        self._tags, self._held, self.is_open = tags, "", opened
        self._is_decided = opened  # True once it is known whether the text begins with a thought
        self._is_blank = True  # True until the part of the text that is read now has more than whitespace

    def put(self, text: str) -> tuple[str, str]:
        """Read more text; return the parts of the thought and of the content that can no longer change."""
        self._held += text
        if not self._is_decided:
            begun = self._held.lstrip()
            if self._tags.opening.startswith(begun) and begun != self._tags.opening:
                return "", ""
            self._is_decided = True
            if begun.startswith(self._tags.opening):
                self.is_open, self._held = True, begun.removeprefix(self._tags.opening)
            else:
                self._is_blank = False  # without a thought, the content is left as it is
        thought = ""
        if self.is_open:
            thought, tag, rest = self._held.partition(self._tags.closing)
            if not tag:
                return self._certain(thought), ""
            thought = self._trimmed(thought.rstrip())
            self.is_open, self._is_blank, self._held = False, True, rest
        content, self._held = self._trimmed(self._held), ""
        return thought, content

    def end(self) -> tuple[str, str]:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return (self._trimmed(held.rstrip()), "") if self.is_open else ("", held)

    def _certain(self, text: str) -> str:
        """Return a thought's text without its end, which may belong to the closing tag or be dropped."""
        closing = self._tags.closing
        lengths = range(min(len(closing) - 1, len(text)), 0, -1)
        begun = next((n for n in lengths if closing.startswith(text[-n:])), 0)
        certain = text[: len(text) - begun].rstrip()
        self._held = text[len(certain) :]
        return self._trimmed(certain)

    def _trimmed(self, text: str) -> str:
        """Return the text without whitespace at the beginning of its part."""
        text = text.lstrip() if self._is_blank else text
        self._is_blank = self._is_blank and not text
        return text
