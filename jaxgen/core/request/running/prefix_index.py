"""Index of the prefix store, whose blocks are pieces of prompts."""

from __future__ import annotations

import collections
import dataclasses
import hashlib

import numpy as np

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.decoding.continuous.pool import piece_size
from jaxgen.core.decoding.continuous.prefixes import NOT_STORED
from jaxgen.core.request.cache_memory import cache_bytes
from jaxgen.core.request.running.engine_sizes import EngineSizes
from jaxgen.errors import InputError

_BYTES = 2**28  # default size of the store, unless the prompts of all slots need less


@dataclasses.dataclass(frozen=True)
class Claim:
    """The blocks of the store that a prompt uses.

    Attributes:
        have: the indices in the store from which the prompt's first pieces are copied.
        keep: the number, name and index in the store of each piece to store once it has been read.
        epoch: the number of times that the store had been emptied before the claim.
    """

    have: tuple[int, ...]
    keep: tuple[tuple[int, bytes, int], ...]
    epoch: int


class Prefixes:
    """An index of the blocks in a store of fixed capacity. The least recently used blocks are evicted.

    Prompts are loaded onto the device in the order of calls to `enter`. A block can therefore be reassigned
    while earlier prompts still have to copy it. Earlier prompts copy a block before a later prompt overwrites it.

    Args:
        capacity: the capacity of the store, in blocks; 0 for no store.
        block: the number of tokens in a block.
        per_prompt: the maximum number of blocks to store per prompt.
    """

    def __init__(self, capacity: int, block: int, per_prompt: int):
        self.capacity, self.block, self.per_prompt = capacity, block, per_prompt if capacity else 0
        self._free = list(range(capacity))
        self._stored: collections.OrderedDict[bytes, int] = collections.OrderedDict()  # least recently used first
        self._coming: set[bytes] = set()
        self._epoch = 0

    @classmethod
    def of(cls, cfg: GenerationConfig, sizes: EngineSizes, hooked: bool = False) -> Prefixes:
        """Return an empty index for the store of an engine.

        With a hook, there is no store, because the hook may change the model's inputs. Equal tokens may then have
        different keys and values.
        """
        width, limit = sizes.prompt_width, sizes.prefix_cache_bytes
        if hooked and limit:
            raise InputError(
                "prefix_cache_bytes must be 0 with a hook, which may change what the model reads of a prompt"
            )
        limit = 0 if hooked else limit
        block = piece_size(cfg, width)
        per_prompt, size = (width - 1) // block, cache_bytes(cfg.model, 1, block, cfg.cache_dtype)
        if limit is None:
            return cls(min(_BYTES // size, sizes.slots * per_prompt), block, per_prompt)
        if 0 < limit < size:
            raise InputError(
                f"prefix_cache_bytes={limit} is less than the {size} bytes of {block} tokens: raise it, or pass 0"
            )
        return cls(limit // size if per_prompt else 0, block, per_prompt)

    def bytes(self, cfg: GenerationConfig) -> int:
        """Return the size of the store in bytes."""
        return cache_bytes(cfg.model, self.capacity, self.block, cfg.cache_dtype) if self.capacity else 0

    def names(self, ids: np.ndarray, adapter: int = -1) -> list[bytes]:
        """Return a name for each whole piece that can be stored. A piece's name identifies all tokens up to its end.

        The piece with the last token is not stored, because the model must read this token to continue. Prompts with
        different adapters do not share blocks.
        """
        names, name = [], adapter.to_bytes(4, "little", signed=True)
        for number in range(min(self.per_prompt, (len(ids) - 1) // self.block)):
            tokens = np.ascontiguousarray(ids[number * self.block : (number + 1) * self.block], np.int32)
            name = hashlib.sha256(name + tokens.tobytes()).digest()
            names.append(name)
        return names

    def must_wait(self, names: list[bytes]) -> bool:
        """Return True if waiting saves work because a prompt in flight will store this prompt's first missing piece."""
        known = self._known(names)
        return known < len(names) and names[known] in self._coming

    def _known(self, names: list[bytes]) -> int:
        """Return the number of leading pieces that are stored."""
        return next((number for number, name in enumerate(names) if name not in self._stored), len(names))

    def enter(self, names: list[bytes]) -> Claim:
        """Claim blocks for a prompt that is about to be sent to the device."""
        known = self._known(names)
        have = tuple(self._stored[name] for name in names[:known])
        for name in reversed(names[:known]):  # in reverse order, so that later blocks are evicted first
            self._stored.move_to_end(name)
        keep = []
        for number, name in enumerate(names[known:], known):
            if name in self._stored or name in self._coming:  # stored or claimed, but an earlier block was evicted
                continue
            if not self._free and len(self._stored) <= known:
                break
            index = self._free.pop() if self._free else self._stored.popitem(last=False)[1]
            self._coming.add(name)
            keep.append((number, name, index))
        return Claim(have, tuple(keep), self._epoch)

    def confirm(self, claim: Claim) -> None:
        """Mark the claimed blocks as stored once the prompt has been fully read."""
        for _, name, index in reversed(claim.keep):
            if claim.epoch == self._epoch:
                self._coming.remove(name)
                self._stored[name] = index
            else:
                self._free.append(index)

    def release(self, claim: Claim) -> None:
        """Free the blocks claimed for a prompt that will not be read completely."""
        for _, name, index in claim.keep:
            self._free.append(index)
            if claim.epoch == self._epoch:
                self._coming.remove(name)

    def clear(self) -> None:
        """Empty the store, because the weights have changed."""
        self._epoch += 1
        self._free += self._stored.values()
        self._stored.clear()
        self._coming.clear()

    def arrays(self, claims: list[Claim], rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `have` and `keep` of `StoreIndices`, int32[rows, `self.per_prompt`]; row i is that of `claims[i]`."""
        have, keep = (np.full((rows, self.per_prompt), NOT_STORED, np.int32) for _ in range(2))
        for row, claim in enumerate(claims):
            have[row, : len(claim.have)] = claim.have
            for number, _, index in claim.keep:
                keep[row, number] = index
        return have, keep
