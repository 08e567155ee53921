"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

`qweight int32[D * bits / 32, F]` has the codes of 32 / bits inputs in each word, lowest bits first. `qzeros` has the
zero points of 32 / bits outputs in each word (minus one, in version 1 of the format), and `scales` is `[groups, F]`.
`g_idx int32[D]` is the group of each input; with act-order, groups do not consist of adjacent inputs. An entry is
`scale * (code - zero)`, rounded to the dtype of the scales.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from convert.errors import CheckpointError
from convert.packed.formats import (
    TRANSPOSED,
    Parts,
    check,
    columns_of,
    flag,
    group_size,
    grouped,
    input_order,
    matrix_shape,
    unpacked,
    whole,
)
from convert.tensors import DTYPES, Tensor
from jaxgen.errors import ConfigError, InputError, shown

_IN_LAYERS = re.compile(r"(?:^|.*\.)layers\.\d+\..*")


@dataclasses.dataclass(frozen=True)
class Gptq:
    """The format of a checkpoint.

    Attributes:
        bits: 4 or 8.
        group: the number of inputs in each group; None if there is only one group.
        symmetric: whether all zero points are in the middle of the codes.
        offset: what is added to the stored zero points: 1 in version 1 of the format.
        head: whether the head is packed.
        mixed: whether the config has lists of modules; the tensors then tell which modules are packed, and how.
    """

    title: ClassVar[str] = "GPTQ"
    keys: ClassVar[Collection[str]] = frozenset(
        "quant_method bits group_size desc_act sym lm_head dynamic pack_dtype checkpoint_format format "
        "is_marlin_format modules_in_block_to_quantize block_name_to_quantize module_name_preceding_first_block "
        # no effect on reading
        "act_group_aware static_groups true_sequential damp_percent damp_auto_increment dataset meta model_seqlen "
        "model_name_or_path model_file_base_name tokenizer batch_size backend disable_exllama exllama_config "
        "use_exllama use_cuda_fp16 max_input_length cache_block_outputs pad_token_id quantizer hyb_act mse".split()
    )
    suffixes: ClassVar[Collection[str]] = ("qweight", "qzeros", "scales", "g_idx")
    required: ClassVar[Sequence[Sequence[str]]] = (("qweight",), ("qzeros",), ("scales",))
    ignored: ClassVar[Mapping[str, str]] = {}

    bits: int
    group: int | None
    symmetric: bool
    offset: int
    head: bool
    mixed: bool
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Gptq:
        """Read a `quantization_config`."""
        version = config.get("checkpoint_format", config.get("format")) or "gptq"
        if flag(config, "is_marlin_format", False):
            version = "marlin"
        if version not in ("gptq", "gptq_v2"):
            raise ConfigError(f"checkpoint_format must be 'gptq' or 'gptq_v2', got {shown(version)}: load another file")
        if config.get("pack_dtype", "int32") not in ("int32", None):
            raise ConfigError(f"pack_dtype must be 'int32', got {shown(config['pack_dtype'])}")
        bits = whole(config, "bits", None, (4, 8))
        flag(config, "desc_act", False)  # g_idx says the same for each matrix
        return cls(
            bits,
            group_size(config, "group_size"),
            flag(config, "sym", True),
            1 if version == "gptq" else 0,
            flag(config, "lm_head", False),
            bool(config.get("dynamic") or config.get("modules_in_block_to_quantize")),
        )

    def is_packed(self, parts: Parts) -> bool:
        """Return True if a module has tensors of the format."""
        return any(name in parts for name in self.suffixes)

    def packs(self, module: str) -> bool | None:
        """Return True for all matrices in layers, and for the head if the config says so."""
        if self.mixed:
            return None
        return self.head if module.endswith("lm_head") else _IN_LAYERS.fullmatch(module) is not None

    def weight(self, name: str, parts: Parts, dtype: Any) -> Any:
        """Return the matrix; the inputs of an act-order file are sorted by their groups."""
        codes, scales = parts["qweight"], parts["scales"]
        (words, rows), (groups, _), bits = matrix_shape("qweight", codes), matrix_shape("scales", scales), self.bits
        if self.mixed and "g_idx" in parts and parts["g_idx"].shape != (words * 32 // bits,):
            bits = words * 32 // max(1, *parts["g_idx"].shape)
            if bits not in (4, 8):
                raise InputError(f"has {bits} bits, wanted 4 or 8: load another file of this model")
        per_word = 32 // bits
        columns = words * per_word
        if columns % groups or (not self.mixed and groups != columns // (self.group or columns)):
            raise InputError(f"has {columns} inputs and {groups} groups, but group_size is {self.group or -1}")
        check("qweight", codes, ("I32",), (words, rows))
        check("scales", scales, DTYPES, (groups, rows))
        check("qzeros", parts["qzeros"], ("I32",), (groups, -(-rows // per_word)))
        order = None
        if "g_idx" in parts:
            check("g_idx", parts["g_idx"], ("I32", "I64"), (columns,))
            order = input_order(parts["g_idx"].read(), groups)
        zeros = self._zeros(name, parts["qzeros"], bits)

        def codes_of(start: int, end: int) -> np.ndarray:
            if self.symmetric and (zeros(start, end) != 2 ** (bits - 1)).any():
                fault = f"has zero points other than {2 ** (bits - 1)}, although sym is true"
                raise CheckpointError([f"{codes.file}: {name} {fault}: set sym to false in the config"])
            found = unpacked(columns_of(codes, start, end).T, bits)
            return found if order is None else found[:, order]

        arrays = {"codes": codes_of, "scales": lambda *rows: columns_of(scales, *rows).T}
        if not self.symmetric:
            arrays["zeros"] = zeros
        step = max(1, TRANSPOSED // columns)
        return grouped(name, (rows, columns), bits, arrays, scales, groups, dtype, order, step)

    def _zeros(self, name: str, stored: Tensor, bits: int) -> Callable[[int, int], np.ndarray]:
        """Return a function that reads the zero points of a range of rows, as uint8[rows, groups]."""
        per_word, largest = 32 // bits, 2**bits - 1

        def zeros(start: int, end: int) -> np.ndarray:
            first = start // per_word
            values = unpacked(columns_of(stored, first, -(-end // per_word)), bits)
            values = values[:, start - first * per_word : end - first * per_word].T
            if self.offset and (values == largest).any():
                fault = f"has stored zero points of {largest}, which programs read in different ways"
                raise CheckpointError([f"{stored.file}: {name} {fault}: load a file with checkpoint_format gptq_v2"])
            return values + np.uint8(self.offset)

        return zeros
