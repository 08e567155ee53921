"""API keys of the service's clients."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from jaxgen.errors import InputError


class Keys:
    """The keys that clients may use, stored as hashes. Without keys, every client is admitted."""

    def __init__(self, keys: Sequence[str]):
        if isinstance(keys, str):
            raise TypeError("keys must be a list, got a single string: pass [key]")
        for number, key in enumerate(keys):
            check_key(f"keys[{number}]", key)
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, authorization: str) -> bool:
        """Return whether a client with this Authorization header is admitted."""
        scheme, _, _ = authorization.partition(" ")
        digest = self.client(authorization)
        # Compare all keys, so that the response time does not reveal anything about them.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return not found or (scheme.lower() == "bearer" and any(found))

    def client(self, authorization: str) -> bytes:
        """Return what identifies the client in an Authorization header: the hash of its key, not the scheme's case."""
        return _digest(authorization.partition(" ")[2])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def check_key(name: str, key: str) -> None:
    """Raise an error if clients cannot send a key. The message has the name of the setting, but not the key."""
    if not isinstance(key, str):
        raise TypeError(f"{name} must be a string, got {type(key).__name__}")
    if not key:
        raise InputError(f"{name} is empty: set a key, or leave it out to answer every client")
    if key != key.strip():
        raise InputError(f"{name} begins or ends with whitespace, which a header drops: remove it")
    if not (key.isascii() and key.isprintable()):
        raise InputError(f"{name} contains a character that a header cannot contain: use printable ASCII characters")
