"""The memory that a model and its cache need and the memory that is free, checked before allocating.

The estimate is a lower bound: compiling and a step's smaller arrays are not counted, so a request that passes may still
fail.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.buckets import capacity_for, prompt_bucket
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.modes import mode_of
from jaxgen.decoding.needs import Needs
from jaxgen.errors import InputError
from jaxgen.model.attention import all_at_once
from jaxgen.model.cache import KVCache
from jaxgen.model.cache_storage import SCALED
from jaxgen.model.config import ModelConfig
from jaxgen.model.quantization import KINDS
from jaxgen.programs import default_device
from jaxgen.request.prepare import Prepared

if TYPE_CHECKING:
    from convert.hf import Checkpoint

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

# Changes that make a request smaller. Only the command's check, before the weights are read, can offer flags.
_REMEDIES: dict[str, dict[str, Any]] = {
    "--dtype bfloat16": {"dtype": np.dtype(jnp.bfloat16)},
    **{f"--quantize {name}": {"quantize": name} for name in KINDS},
    f"cache_dtype={SCALED.name!r}": {"cache_dtype": SCALED.name},
    "a smaller max_new_tokens": {"new_tokens": 1},
    "a smaller num_return_sequences or num_beams": {"sequences": 1},
    "a smaller top_k": {"candidates": 1},
    "fewer prompts at once": {"prompts": 1},
    "fewer slots": {"slots": 1},
    "prefix_cache_bytes=0": {"prefixes": 0},
    "a shorter prompt": {"width": 1},
}
_SMALL = 2**28  # bytes; to read what is free would take longer than some calls that need less


@functools.lru_cache
def cache_bytes(model: ModelConfig, rows: int, slots: int, dtype: str | None = None) -> int:
    """Return the bytes of `KVCache.create(model, rows, slots, dtype)`."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: KVCache.create(model, rows, slots, dtype)))
    return sum([math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves])


def check_memory(
    path: str | PathLike[str],
    cfg: GenerationConfig,
    prompts: int,
    prompt_width: int,
    dtype: Any = None,
    quantize: str | None = None,
    assistant: str | PathLike[str] | None = None,
) -> None:
    """Raise an error if the device lacks the memory to load a checkpoint and run `generate` with it.

    Args:
        path: the checkpoint's directory.
        cfg: as for `generate`; `max_new_tokens` is set.
        prompts: B.
        prompt_width: P, padding included.
        dtype, quantize: as for `load_hf`.
        assistant: the directory of the draft model, or None.

    Raises:
        InputError: too little is free; the message names what would help.
        CheckpointError: a faulty checkpoint; only the weights' values are not checked.
        ConfigError: a dtype or quantize that `load_hf` does not accept.
    """
    from convert.hf import float_dtype, open_checkpoint  # here, because generate() works without checkpoints

    device = default_device()
    checkpoint = open_checkpoint(path)
    request = _Quantities(
        sources=(checkpoint,) if assistant is None else (checkpoint, open_checkpoint(assistant)),
        dtype=float_dtype(dtype),
        quantize=quantize,
        on_cpu=device.platform == "cpu",
        prompts=prompts,
        width=prompt_width,
        new_tokens=int(np.max(np.asarray(cfg.max_new_tokens))),
        **_of_config(cfg, mode_of(cfg, assistant is not None).needs(cfg)),
    )
    free = free_bytes(device)
    if free is None or (needed := request.needed()) <= free:
        return
    weights = _size(_weights(checkpoint.quantize(quantize), request.dtype))
    raise InputError(
        f"this request needs {_size(needed)} ({weights} of weights) {_and_only(free, device)}: try "
        f"{request.remedy(free)}"
    )


def check_call_memory(prepared: Prepared, prefixes: int = 0) -> None:
    """Raise an error if the device lacks the memory for a call of `generate`, the weights being there.

    `prefixes`: the bytes of an engine's store of prefixes.

    Raises:
        InputError: too little is free; the message names what would help.
    """
    run, device = prepared.run, _device_of(prepared)
    request = dataclasses.replace(_quantities(prepared), prefixes=prefixes)
    # Devices of a mesh have about equal parts; those of a CPU have one memory.
    devices = 1 if device.platform == "cpu" or run.mesh is None else run.mesh.size
    if (needed := request.needed() // devices) <= _SMALL:
        return
    free = free_bytes(device)
    if free is not None and needed > free:
        remedy = request.remedy(free * devices)
        raise InputError(f"this call needs {_size(needed)} {_and_only(free, device)}: try {remedy}")


def call_bytes(prepared: Prepared) -> int:
    """Estimate the bytes that a call of `generate` needs in addition to the weights, on all devices together."""
    return _quantities(prepared).needed()


def _device_of(prepared: Prepared):
    """Return a `jax.Device` of the parameters, one of this process."""
    leaf = jax.tree.leaves(prepared.run.params)[0]
    devices = leaf.devices() if isinstance(leaf, jax.Array) else {default_device()}
    return min(devices, key=lambda device: (device.process_index != jax.process_index(), device.id))


def _quantities(prepared: Prepared) -> _Quantities:
    run = prepared.run
    return _Quantities(
        sources=(run.model,) if run.draft is None else (run.model, run.draft.model),
        dtype=None,
        quantize=None,
        on_cpu=_device_of(prepared).platform == "cpu",
        prompts=run.sizes.prompts,
        width=prepared.request.ids.shape[1],
        new_tokens=prepared.new_tokens,
        **_of_config(run.cfg, run.needs),
    )


def _of_config(cfg: GenerationConfig, needs: Needs) -> dict[str, Any]:
    """Return the quantities that the config and its mode determine."""
    return {
        "sequences": needs.sequences,
        "candidates": needs.candidates,
        "heads": needs.heads,
        "final_states": needs.final_states,
        "records": bool(cfg.output_scores) + bool(cfg.output_logits),
        "cache_dtype": cfg.cache_dtype,
        "slots": cfg.slots,
    }


def _and_only(free: int, device) -> str:
    return f"and only {_size(free)} is free{'' if device.platform == 'cpu' else f' on {device}'}"


def free_bytes(device) -> int | None:
    """Return the bytes that can still be allocated on a `jax.Device`; None if unknown.

    For a CPU it is the memory that Linux calls available, or less if a control group (version 2) sets a limit.
    """
    if device.platform == "cpu":
        return min([*_available(), *_left_in_control_groups()], default=None)
    statistics = device.memory_stats() or {}
    limit, used = statistics.get("bytes_limit", -1), statistics.get("bytes_in_use", -1)
    return limit - used if limit > 0 and used >= 0 else None


@dataclasses.dataclass(frozen=True)
class _Quantities:
    """The quantities that determine the memory needed.

    `sources` are the model and its draft model, if there is one: a checkpoint, which must be loaded, or the config of a
    model that is in memory. `records` is the number of outputs `[N, rows, V]`; what the mode needs is in `Needs`. With
    `slots`, that many rows are in memory, and at most as many prompts at a time.
    """

    sources: tuple[Checkpoint | ModelConfig, ...]
    dtype: np.dtype | None
    quantize: str | None
    on_cpu: bool
    prompts: int
    width: int
    sequences: int
    candidates: int
    heads: int
    final_states: bool
    new_tokens: int
    records: int
    cache_dtype: str | None
    slots: int | None = None
    prefixes: int = 0

    def needed(self) -> int:
        """Return the bytes of the weights, the cache, the prefill's attention, the logits and the hidden states."""
        model, width, capacity = self._model(self.sources[0]), prompt_bucket(self.width), self._capacity()
        prompts, rows = self._at_a_time()
        stored = sum([self._weights(source) + self._cache(source) for source in self.sources])
        context = 4 * rows * (width + capacity) * model.hidden_size if self.final_states else 0
        # By XLA's memory analysis, scores, exponentials and weights coexist on a CPU.
        scores = (3 if self.on_cpu else 1) * 4 * prompts * model.num_attention_heads * width**2
        # In slots, or if the prompt is long, there are only blocks of the scores.
        attention = scores if self.slots is None and all_at_once(width, width) else 0
        logits = 4 * model.vocab_size * rows * (self.candidates * self.heads + self.records * capacity)
        return stored + attention + logits + context + self.prefixes

    def _at_a_time(self) -> tuple[int, int]:
        """Return the number of prompts and of their sequences that are in memory at a time."""
        rows = self.prompts * self.sequences
        if self.slots is None:
            return self.prompts, rows
        return self.slots, self.slots  # all of them, even if there are fewer sequences

    def _capacity(self) -> int:
        return capacity_for(self.new_tokens, recorded=self.records > 0)

    def _model(self, source: Checkpoint | ModelConfig) -> ModelConfig:
        if isinstance(source, ModelConfig):
            return source
        return dataclasses.replace(source.cfg.model, dtype=source.dtype(self.dtype).name)

    def _weights(self, source: Checkpoint | ModelConfig) -> int:
        if isinstance(source, ModelConfig):
            return 0
        source = source.quantize(self.quantize)
        weights = _weights(source, self.dtype)
        if source.kind:
            return weights
        if self.on_cpu and source.dtype(self.dtype) == np.float16:  # XLA's CPU program stores a float32 copy of all
            weights += _weights(source, np.dtype(np.float32))
        return weights

    def _cache(self, source: Checkpoint | ModelConfig) -> int:
        model, (prompts, rows) = self._model(source), self._at_a_time()
        read = cache_bytes(model, prompts, prompt_bucket(self.width), self.cache_dtype)
        return read + cache_bytes(model, rows * self.candidates, self._capacity(), self.cache_dtype)

    def remedy(self, free: int) -> str:
        """Name what makes the request fit: single changes that suffice, else a combination."""

        given = {"fewer slots": self.slots, "prefix_cache_bytes=0": self.prefixes}
        remedies = [name for name in _REMEDIES if given.get(name, True)]

        def fit(names: Iterable[str]) -> bool:
            changes = {field: value for name in names for field, value in _REMEDIES[name].items()}
            return dataclasses.replace(self, **changes).needed() <= free

        if alone := [name for name in remedies if fit([name])]:
            return " or ".join(alone)
        together = set(remedies)
        if not fit(together):
            return "a smaller model or a machine with more memory"
        for name in remedies:
            if fit(together - {name}):
                together.remove(name)
        return " and ".join(name for name in remedies if name in together)


def _weights(checkpoint: Checkpoint, wanted: np.dtype | None) -> int:
    return sum(checkpoint.sizes(wanted).values())


def _available() -> Iterator[int]:
    """Yield the bytes that the kernel can allocate without swapping."""
    for line in _lines(_PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _left_in_control_groups() -> Iterator[int]:
    """Yield the bytes left in each limited control group of this process; the page cache counts as free."""
    for line in _lines(_PROC / "self" / "cgroup"):
        if not line.startswith("0::/"):
            continue
        own = _CGROUPS / line.removeprefix("0::/")
        for group in (own, *own.parents):
            limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
            if limit and used and limit[0] != "max":
                statistics = dict(entry.split() for entry in _lines(group / "memory.stat"))
                pages = sum(int(statistics.get(name, 0)) for name in ("active_file", "inactive_file"))
                yield max(0, int(limit[0]) - int(used[0]) + pages)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
