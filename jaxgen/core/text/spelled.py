"""A tokenizer for grammars that contain special tokens."""

from __future__ import annotations

from collections.abc import Collection

from jaxgen.core.text.tokenizer import Tokenizer


class Spelled(Tokenizer):
    """A tokenizer whose `token_bytes` has the text of some special tokens, so that a grammar can allow them.

    Everything else is as in `tokenizer`.
    """

    def __init__(self, tokenizer: Tokenizer, special: Collection[str]):
        self.__dict__.update(vars(tokenizer))
        ids = ((token, self.backend.token_to_id(token)) for token in special)
        self._spelled = {index: token.encode() for token, index in ids if index is not None}

    def token_bytes(self) -> list[bytes | None]:
        """Return the bytes that each id adds to the text, as in `Tokenizer`."""
        texts = super().token_bytes()
        for index, text in self._spelled.items():
            texts[index] = text
        return texts
