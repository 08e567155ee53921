"""AWQ checkpoints, as AutoAWQ writes them in its format "gemm".

`qweight int32[D, F / 8]` has the 4-bit codes of 8 outputs in each word, `qzeros int32[groups, F / 8]` has their zero
points in the same order, and `scales` is `[groups, F]`. An entry is `scale * (code - zero)`, rounded to the dtype of
the scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from convert.packed.formats import (
    TRANSPOSED,
    Parts,
    check,
    columns_of,
    flag,
    group_size,
    grouped,
    is_excluded,
    matrix_shape,
    patterns,
    unpacked,
    whole,
)
from convert.tensors import DTYPES, Tensor
from jaxgen.errors import ConfigError, InputError, shown

_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the number of the 4 bits, from the lowest, of each output of a word


@dataclasses.dataclass(frozen=True)
class Awq:
    """The format of a checkpoint; `group` is None if there is only one group of inputs."""

    title: ClassVar[str] = "AWQ"
    keys: ClassVar[Collection[str]] = frozenset(
        "quant_method bits w_bit group_size q_group_size zero_point version format modules_to_not_convert backend "
        # no effect on reading
        "do_fuse fuse_max_seq_len modules_to_fuse exllama_config".split()
    )
    suffixes: ClassVar[Collection[str]] = ("qweight", "qzeros", "scales")
    required: ClassVar[Sequence[Sequence[str]]] = (("qweight",), ("qzeros",), ("scales",))
    ignored: ClassVar[Mapping[str, str]] = {}

    group: int | None
    excluded: tuple[str, ...]
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Awq:
        """Read a `quantization_config`."""
        version = config.get("version") or config.get("format") or "gemm"
        if config.get("backend") == "llm-awq":
            version = "llm-awq"
        if not isinstance(version, str) or version.lower() != "gemm":
            raise ConfigError(f"version must be 'gemm', got {shown(version)}: load another file of this model")
        whole(config, "w_bit" if "w_bit" in config else "bits", 4, (4,))
        if not flag(config, "zero_point", True):
            raise ConfigError("zero_point must be true: load another file of this model")
        group = group_size(config, "q_group_size" if "q_group_size" in config else "group_size")
        return cls(group, patterns(config, "modules_to_not_convert"))

    def is_packed(self, parts: Parts) -> bool:
        """Return True if a module has tensors of the format."""
        return any(name in parts for name in self.suffixes)

    def packs(self, module: str) -> bool | None:
        """Return True if the config says that a module's matrix is packed; the head never is."""
        return not is_excluded(module, self.excluded) and not module.endswith("lm_head")

    def weight(self, name: str, parts: Parts, dtype: Any) -> Any:
        """Return the matrix."""
        codes, scales = parts["qweight"], parts["scales"]
        columns, words = matrix_shape("qweight", codes)
        rows = words * 8
        groups = columns // (self.group or columns)
        if self.group and columns % self.group:
            raise InputError(f"has {columns} inputs, which group_size {self.group} does not divide")
        check("qweight", codes, ("I32",), (columns, rows // 8))
        check("scales", scales, DTYPES, (groups, rows))
        check("qzeros", parts["qzeros"], ("I32",), (groups, rows // 8))

        def outputs_of(tensor: Tensor, start: int, end: int) -> np.ndarray:
            first = start // 8
            words = columns_of(tensor, first, -(-end // 8))
            found = unpacked(words, 4).reshape(*words.shape, 8)[..., _ORDER].reshape(len(words), -1)
            return found[:, start - first * 8 : end - first * 8].T

        arrays = {
            "codes": lambda *rows: outputs_of(codes, *rows),
            "zeros": lambda *rows: outputs_of(parts["qzeros"], *rows),
            "scales": lambda *rows: columns_of(scales, *rows).T,
        }
        step = max(8, TRANSPOSED // columns)
        return grouped(name, (rows, columns), 4, arrays, scales, groups, dtype, None, step)
