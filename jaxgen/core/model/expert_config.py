"""Experts in config.json: their number and sizes, which layers have them, and the names of their tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxgen.core.model.config_fields import Field, flag, fraction, read_fields, whole
from jaxgen.errors import ConfigError, shown


def _whole_numbers() -> Field:
    def fits(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(type(number) is int for number in value)

    return Field("a list of whole numbers", fits, default=(), read=tuple)


@dataclasses.dataclass(frozen=True)
class ExpertRule:
    """The experts of a family: keys of config.json, and names of tensors below a layer's name.

    Attributes:
        count: the key for the number of experts in files that jaxgen writes; both `COUNTS` are read.
        width: the key for an expert's width.
        router: the name of the router's matrix.
        projections: the name of each projection of an expert, by its name in jaxgen; `{}` is the expert's index.
        dense_layers: whether layers without experts are possible.
        shared: whether each layer with experts also has a shared expert, which all tokens use.
        normalizes: whether the weights of a token's experts always add up to 1. If False, `norm_topk_prob` decides.
    """

    count: str
    width: str
    router: str
    projections: Mapping[str, str]
    dense_layers: bool = False
    shared: bool = False
    normalizes: bool = False

    @property
    def fields(self) -> dict[str, Field]:
        """The keys that become fields of a `ModelConfig`."""
        fields = {"num_experts_per_tok": whole(1), "router_aux_loss_coef": fraction(0.001)}
        if self.width == "moe_intermediate_size":
            fields["moe_intermediate_size"] = whole(1)
        if self.shared:
            fields["shared_expert_intermediate_size"] = whole(1)
        if not self.normalizes:
            fields["norm_topk_prob"] = flag(False)
        return fields

    @property
    def keys(self) -> dict[str, Field]:
        """The other keys."""
        keys: dict[str, Field] = {key: whole(1, None, most=10_000) for key in COUNTS}
        if self.dense_layers:
            keys |= {"mlp_only_layers": _whole_numbers(), "decoder_sparse_step": whole(1, 1)}
        return keys

    def read(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[bool, ...]]:
        """Return the fields of a `ModelConfig` that describe experts, and whether each layer has experts.

        Raises:
            ConfigError: the values are missing, contradictory or out of range.
        """
        values, problems = read_fields(self.fields | self.keys | {self.width: whole(1)}, config)
        counts = {values[key] for key in COUNTS if values.get(key)}
        if len(counts) > 1:
            problems.append(f"{' and '.join(COUNTS)} differ: keep one")
        if not counts and not problems:
            problems.append(f"missing: {self.count}")
        count = next(iter(counts), 0)
        if not problems and values["num_experts_per_tok"] > count:
            used = values["num_experts_per_tok"]
            problems.append(f"num_experts_per_tok must be at most {self.count} {count}, got {used}")
        layers = config["num_hidden_layers"]
        if wrong := [layer for layer in values.get("mlp_only_layers", ()) if not 0 <= layer < layers]:
            problems.append(f"mlp_only_layers must be numbers from 0 to {layers - 1}, got {shown(wrong[0])}")
        if problems:
            raise ConfigError("; ".join(problems))
        dense, step = values.get("mlp_only_layers", ()), values.get("decoder_sparse_step", 1)
        fields = {name: values[name] for name in self.fields}
        fields |= {"num_experts": count, "moe_intermediate_size": values[self.width]}
        fields.setdefault("norm_topk_prob", True)
        return fields, tuple([(layer + 1) % step == 0 and layer not in dense for layer in range(layers)])

    def write(self, count: int | None, experts: tuple[bool, ...]) -> dict[str, Any]:
        """Return the entries of config.json for the number of experts and for the layers that have them."""
        entries: dict[str, Any] = {self.count: count}
        if self.dense_layers:
            dense = [layer for layer, has_experts in enumerate(experts) if not has_experts]
            entries |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
        return entries


# Both keys mean the number of experts: releases before 5 wrote the first for Qwen, and release 5 the second.
COUNTS = ("num_experts", "num_local_experts")

_QWEN = {name: f"mlp.experts.{{}}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
_MIXTRAL = {
    name: f"block_sparse_moe.experts.{{}}.{own}.weight"
    for name, own in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items()
}
QWEN_EXPERTS = ExpertRule("num_experts", "moe_intermediate_size", "mlp.gate.weight", _QWEN, dense_layers=True)
QWEN_SHARED = dataclasses.replace(QWEN_EXPERTS, shared=True)
MIXTRAL_EXPERTS = ExpertRule(
    "num_local_experts", "intermediate_size", "block_sparse_moe.gate.weight", _MIXTRAL, normalizes=True
)
