"""The grammar of text that ends at a tag."""

from __future__ import annotations

from jaxgen.core.grammar.grammar import Grammar


def free_text(*ends: str) -> Grammar:
    """Return the grammar of any text that contains none of `ends`; it may end with a part of one of them.

    All `ends` begin with the same character, which occurs only once in each.
    """
    first, begun = ends[0][0], dict.fromkeys(end[:length] for end in ends for length in range(1, len(end)))
    following = {text: "".join(end[len(text)] for end in ends if end.startswith(text)) for text in begun}
    apart = [text + Grammar.any_character(but=first + following[text]) for text in begun]
    beginnings = Grammar.choice(begun).repeat()
    return Grammar.choice([Grammar.any_character(but=first), beginnings + Grammar.choice(apart)]).repeat() + beginnings
