"""Rotary position embedding as config.json describes it: one record per RoPE, and the rules for a model's layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxgen.core.model import config_keys
from jaxgen.core.model.config_fields import FULL, SLIDING, flag, numbers, positive, read_fields, whole
from jaxgen.errors import ConfigError, one_line, shown, warn

# Required and optional parameters of each type of RoPE
_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
}
_FIELDS = {
    "truncate": flag(None),
    "original_max_position_embeddings": whole(2),
    "short_factor": numbers(),
    "long_factor": numbers(),
}
_DEFAULT = {"rope_type": "default"}
_ORIGINAL = "original_max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
_DEFAULT_THETA = 10000.0
# Parameters of RoPE with which some architecture computes something else, with their neutral values. The keys in
# `config_keys.neutral` count here too.
_NEUTRAL = {"alpha": (1,)}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its base and, if the context is extended, the parameters of the scaling method.

    `type` is default, linear, dynamic, llama3, yarn or longrope, as in transformers' `ROPE_INIT_FUNCTIONS`. Each field
    after `theta` applies only to some types and is None for all other types, except `partial_rotary_factor`: the part
    of each head that is rotated, None for the whole head.
    """

    type: str
    theta: float
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    partial_rotary_factor: float | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read RoPE's parameters from `rope_theta` and `rope_scaling`, or from `rope_parameters`, in a config.json.

        A warning names parameters that transformers ignores, such as `attn_factor`.

        Raises:
            ConfigError: the type is not implemented, or parameters are missing or invalid.
        """
        rope, notes = read_rope(config)
        if notes:
            warn(f"config.json: {'; '.join(notes)}")
        return rope

    def to_hf(self) -> dict[str, Any] | None:
        """Return the `rope_scaling` entry of a config.json; None for the default type."""
        if self.type == "default":
            return None
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        fields = {name: value for name, value in values.items() if name not in ("type", "theta", _PARTIAL)}
        # transformers before 4.43 reads "type" instead of "rope_type", and accepts only "type" and "factor"
        names = {"type": self.type} if self.type in ("linear", "dynamic") else {"rope_type": self.type}
        return names | {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    def width(self, head_dim: int) -> int:
        """Return the number of dimensions of a head that are rotated: the first ones."""
        return int(head_dim * (self.partial_rotary_factor or 1))


# The types that most families can have, by the names in their files
_COMMON_TYPES = {name: name for name in _PARAMETERS if name != "longrope"}


@dataclasses.dataclass(frozen=True)
class RopeRule:
    """Rule for reading each layer's RoPE from a config.json, beyond `rope_theta`, `rope_scaling`, `rope_parameters`.

    Attributes:
        read: maps a config and each layer's window to each layer's RoPE (None for a layer that rotates nothing) and to
            the content of a warning. Raises `ConfigError` if values are missing, invalid or contradictory.
        write: the inverse of `read`: maps each layer's RoPE and window to entries of a config.json.
        keys: other keys that the rule reads.
    """

    read: Callable[[Mapping[str, Any], tuple[int | None, ...]], tuple[tuple[RopeConfig | None, ...], list[str]]]
    write: Callable[[tuple[RopeConfig | None, ...], tuple[int | None, ...]], dict[str, Any]]
    keys: tuple[str, ...] = ()


def read_rope(
    config: Mapping[str, Any], types: Mapping[str, str] = _COMMON_TYPES, partial: bool = False
) -> tuple[RopeConfig, list[str]]:
    """Read one RoPE for all layers; also return the content of a warning about the parameters that are ignored.

    `types` maps the names of types that a file may contain to types. With `partial`, `partial_rotary_factor` counts.
    """
    source, given = _entry(config, partial)
    rope_type, theta = given.pop("rope_type"), given.pop("rope_theta")
    if not isinstance(rope_type, str) or rope_type not in types:
        raise ConfigError(f"{source}: rope_type must be one of {', '.join(types)}, got {shown(rope_type)}")
    rope_type = types[rope_type]
    required, optional = _PARAMETERS[rope_type]
    fields = {name: _FIELDS.get(name, positive()) for name in required}
    fields |= {name: _FIELDS.get(name, positive(None)) for name in optional}
    if partial:
        fields[_PARTIAL] = positive(None)
    if rope_type in ("llama3", "yarn", "longrope") and config.get(_ORIGINAL) is not None:
        if given.get(_ORIGINAL, config[_ORIGINAL]) != config[_ORIGINAL]:
            raise ConfigError(f"{_ORIGINAL} differs in {source} and beside it: keep one")
        given[_ORIGINAL] = config[_ORIGINAL]
    if rope_type == "yarn":
        given.setdefault(_ORIGINAL, config.get("max_position_embeddings"))
    values, problems = read_fields(fields, given)
    if rope_type == "llama3" and not problems and values["low_freq_factor"] >= values["high_freq_factor"]:
        problems.append("low_freq_factor must be less than high_freq_factor")
    others = {name: _NEUTRAL.get(name) or config_keys.neutral(name) for name in sorted(set(given) - set(fields))}
    problems += [
        f"{name}={shown(given[name])} is not implemented"
        for name, neutral in others.items()
        if neutral is not None and not config_keys.is_neutral(given[name], neutral)
    ]
    problems = [f"{source} (rope_type {rope_type}): {problem}" for problem in problems]
    base, faults = read_fields({"rope_theta": positive()}, {"rope_theta": theta})
    problems += faults
    if not faults and base["rope_theta"] <= 1:
        problems.append(f"rope_theta must be > 1, got {theta}")
    if values.get(_PARTIAL) and values[_PARTIAL] > 1:
        problems.append(f"{_PARTIAL} must be at most 1, got {values[_PARTIAL]}")
    if problems:
        raise ConfigError("; ".join(problems))
    if values.get(_PARTIAL) == 1:
        values[_PARTIAL] = None
    ignored = [name for name, neutral in others.items() if neutral is None]
    if rope_type == "default" and _ORIGINAL in ignored:
        ignored.remove(_ORIGINAL)  # transformers writes it
    notes = (
        [f"{source} (rope_type {rope_type}): ignored, as in transformers: {one_line(', '.join(ignored), 500)}"]
        if ignored
        else []
    )
    return RopeConfig(type=rope_type, theta=base["rope_theta"], **values), notes


def _entry(config: Mapping[str, Any], partial: bool) -> tuple[str, dict[str, Any]]:
    """Return the name of the entry for RoPE, and its content with the newer key names, no nulls and `rope_theta`."""
    entries = {name: config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name) is not None}
    read = {name: _normal(name, entry, config, partial) for name, entry in entries.items()}
    if len(read) == 2 and read["rope_scaling"] != read["rope_parameters"]:
        raise ConfigError("rope_scaling and rope_parameters differ: keep one")
    source = next(reversed(read), "rope_scaling")
    return source, read[source] if read else _normal(source, {}, config, partial)


def _normal(source: str, entry: Any, config: Mapping[str, Any], partial: bool) -> dict[str, Any]:
    """Return a copy of `rope_scaling` or `rope_parameters`, with what other keys of the config.json contribute."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{source} must be a dict or null, got {shown(entry)}")
    given = {name: value for name, value in entry.items() if value is not None}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ConfigError(f"{source} has one entry per layer type, but this architecture has one RoPE for all layers")
    old_name = given.pop("type", None)
    if old_name is not None and given.setdefault("rope_type", old_name) != old_name:
        raise ConfigError(f"{source}: type and rope_type differ: keep rope_type")
    given.setdefault("rope_type", None if source == "rope_scaling" and given else "default")
    given.setdefault("rope_theta", config.get("rope_theta", _DEFAULT_THETA))
    if partial and config.get(_PARTIAL) is not None:
        given.setdefault(_PARTIAL, config[_PARTIAL])
    return given


def _write_one(ropes: tuple[RopeConfig | None, ...], windows: tuple[int | None, ...]) -> dict[str, Any]:
    rope = next((rope for rope in ropes if rope is not None), None)
    if rope is None:
        return {}
    entries = {"rope_theta": rope.theta, "rope_scaling": rope.to_hf()}
    if rope.partial_rotary_factor is not None:
        entries[_PARTIAL] = rope.partial_rotary_factor
    if rope.type == "longrope":  # `Phi3Config` reads the value beside the entry
        entries[_ORIGINAL] = rope.original_max_position_embeddings
    return entries


def _one(types: Mapping[str, str], partial: bool) -> RopeRule:
    def read(config: Mapping[str, Any], windows: tuple[int | None, ...]):
        rope, notes = read_rope(config, types, partial)
        return (rope,) * len(windows), notes

    return RopeRule(read, _write_one, (_PARTIAL,) if partial else ())


# The same RoPE in all layers
ONE_ROPE = _one(_COMMON_TYPES, partial=False)
# The same for Phi-3. transformers 5 reads the older names "su" and "yarn" as longrope.
LONG_ROPE = _one({"default": "default"} | dict.fromkeys(("longrope", "su", "yarn"), "longrope"), partial=True)


def _read_where_switched_on(config: Mapping[str, Any], windows: tuple[int | None, ...]):
    rope, notes = read_rope(config)
    return tuple([rope if switch else None for switch in rope_switches(config, len(windows))]), notes


def rope_switches(config: Mapping[str, Any], layers: int) -> list[int]:
    """Return 1 for each layer that rotates queries and keys, and 0 for the others, as in `SmolLM3Config`."""
    switches = config.get("no_rope_layers")
    if switches is None:
        interval = config["no_rope_layer_interval"]
        if type(interval) is not int or interval < 1:
            raise ConfigError(f"no_rope_layer_interval must be a whole number >= 1, got {shown(interval)}")
        return [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(switches, list | tuple) or len(switches) < layers or not set(map(str, switches)) <= {"0", "1"}:
        raise ConfigError(f"no_rope_layers must have 0 or 1 for each of the {layers} layers, got {shown(switches)}")
    return [int(switch) for switch in switches[:layers]]


def _write_switches(ropes: tuple[RopeConfig | None, ...], windows: tuple[int | None, ...]) -> dict[str, Any]:
    return _write_one(ropes, windows) | {"no_rope_layers": [int(rope is not None) for rope in ropes]}


# Layers without RoPE where `no_rope_layers` has a 0
SWITCHED_ROPE = RopeRule(_read_where_switched_on, _write_switches, ("no_rope_layers", "no_rope_layer_interval"))


def _by_newer_names(rope: RopeConfig) -> dict[str, Any] | None:
    """Return `rope.to_hf()` with "rope_type", the only name that classes with two RoPEs read."""
    entry = rope.to_hf()
    return entry and {"rope_type": rope.type} | {name: value for name, value in entry.items() if name != "type"}


def by_window(local_theta: str | None, only_theta: float | None = None) -> RopeRule:
    """Return the rule for two RoPEs: one for layers with a window, and one for those without, which alone is scaled.

    Args:
        local_theta: the key with the base for layers with a window; None if both have the same base.
        only_theta: the only base that a file may have, unless `rope_parameters` has an entry per layer type.
    """

    def read(config: Mapping[str, Any], windows: tuple[int | None, ...]):
        rest = {name: value for name, value in config.items() if name not in ("rope_scaling", "rope_parameters")}
        local = rest if local_theta is None else rest | {"rope_theta": rest.get(local_theta)}
        entry = config.get("rope_parameters")
        if isinstance(entry, Mapping) and {FULL, SLIDING} & set(entry):
            if config.get("rope_scaling") is not None:
                raise ConfigError("rope_scaling and rope_parameters differ: keep one")
            kinds = {FULL: rest, SLIDING: local}
            parts = [read_rope(base | {"rope_parameters": entry.get(kind)}) for kind, base in kinds.items()]
        else:
            parts = [read_rope(config), read_rope(local)]
            theta = parts[0][0].theta
            if only_theta is not None and theta != only_theta:
                raise ConfigError(
                    f"rope_theta={theta}: transformers would use it in layers without a window only, and {only_theta} "
                    "in the others; give rope_parameters with an entry for each of the two"
                )
        (full, notes), (windowed, more) = parts
        return tuple([full if window is None else windowed for window in windows]), [*notes, *more]

    def write(ropes: tuple[RopeConfig | None, ...], windows: tuple[int | None, ...]) -> dict[str, Any]:
        pairs = zip(ropes, windows, strict=True)
        found = {FULL if window is None else SLIDING: rope for rope, window in pairs if rope is not None}
        if local_theta is None:
            entries = {
                kind: {"rope_theta": rope.theta, **(_by_newer_names(rope) or _DEFAULT)} for kind, rope in found.items()
            }
            return {"rope_parameters": entries}
        entries = {local_theta: found[SLIDING].theta} if SLIDING in found else {}
        if FULL in found:
            entries |= {"rope_theta": found[FULL].theta, "rope_scaling": _by_newer_names(found[FULL])}
        return entries

    return RopeRule(read, write, () if local_theta is None else (local_theta,))
