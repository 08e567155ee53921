"""Training: the loss, a pure step function built on optax, and a loop that resumes after being killed.

The step is a function of a state and a batch. Jit the function and call it in your own loop:

>>> step = jax.jit(functools.partial(train_step, model=cfg.model, cfg=TrainConfig(steps=1000)))
>>> state = TrainState.create(params, TrainConfig(steps=1000))
>>> state, metrics = step(state, batch)
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgen.core.model.causal_lm import forward
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.loss import next_token_loss
from jaxgen.core.model.sharding import mesh_of, place_rows, replicate
from jaxgen.core.model.weights import has_packed
from jaxgen.errors import ConfigError, InputError
from jaxgen.programs import Program, program
from jaxgen.training.checkpoint import newest_notes, read_state, remove_states
from jaxgen.training.lora import attach
from jaxgen.training.record import Evaluation
from jaxgen.training.run_log import RunLog


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Settings for training with AdamW (arXiv 1711.05101), gradient clipping, linear warm-up and cosine decay.

    Attributes:
        steps: the total number of optimizer steps.
        learning_rate: the peak rate, reached after `warmup` steps.
        warmup: the number of steps over which the rate rises linearly from 0.
        final_rate: the rate at the end, as a fraction of the peak.
        b1: AdamW's b1.
        b2: AdamW's b2.
        eps: AdamW's eps.
        weight_decay: AdamW's weight decay, applied only to matrices, not to biases or norms.
        clip: the maximum global norm of the gradient.
        accumulate: the number of equal micro-batches in a batch; each step uses the gradient of the whole batch.
        dtype: the dtype of the forward and backward passes; the trained weights stay float32.
        remat: recompute each layer in the backward pass, which saves memory but takes more time.
        router_loss: add the loss that balances the use of experts, times the model's `router_aux_loss_coef`, as
            transformers does with `output_router_logits`.
        lora_scale: the factor applied to low-rank updates, if they are trained.
        seed: the seed for dropout.
    """

    steps: int
    learning_rate: float = 1e-4
    warmup: int = 0
    final_rate: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    accumulate: int = 1
    dtype: str = "float32"
    remat: bool = False
    router_loss: bool = False
    lora_scale: float = 1.0
    seed: int = 0

    def __post_init__(self):
        at_least = {"steps": 1, "warmup": 0, "accumulate": 1, "final_rate": 0, "weight_decay": 0, "seed": 0}
        for name, least in at_least.items():
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)!r}")
        for name in ("learning_rate", "clip", "eps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)!r}")
        if self.warmup >= self.steps:
            raise ConfigError(f"warmup must be less than steps, got {self.warmup} of {self.steps}")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype must be float32, bfloat16 or float16, got {self.dtype!r}")

    def optimizer(self) -> optax.GradientTransformation:
        """Return the optax optimizer."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(self.rate, self.b1, self.b2, self.eps, weight_decay=self.weight_decay, mask=_matrices),
        )

    def rate(self, step) -> jax.Array:
        """Return the learning rate of a step. Steps are counted from 0."""
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0 if self.warmup else self.learning_rate,
            peak_value=self.learning_rate,
            warmup_steps=self.warmup,
            decay_steps=self.steps,
            end_value=self.learning_rate * self.final_rate,
        )
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            return jnp.asarray(schedule(step), jnp.float32)


def _matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


@flax.struct.dataclass
class TrainState:
    """The state that a training step updates.

    Attributes:
        params: the trained parameters, in float32: the model's own parameters, or low-rank updates to them.
        optimizer: optax's state.
        step: int32[], the number of completed steps.
    """

    params: Any
    optimizer: Any
    step: jax.Array

    @classmethod
    def create(cls, params, cfg: TrainConfig) -> TrainState:
        """Return the initial state, with `params` copied to float32.

        Raises:
            InputError: the parameters are quantized.
        """
        if has_packed(params):
            raise InputError("params are quantized and cannot be trained: load them with quantize='none'")
        params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
        return cls(params, cfg.optimizer().init(params), jnp.zeros((), jnp.int32))


@flax.struct.dataclass
class TrainBatch:
    """Rows of text, padded or packed.

    Attributes:
        ids: int32[R, T].
        labels: int32[R, T]. A label is the token's id, or -100 for tokens that do not contribute to the loss: padding,
            the first token of a text, and questions.
        segments: int32[R, T], the number of the token's text within the row, starting from 1; 0 for padding at the end.
    """

    ids: jax.Array | np.ndarray
    labels: jax.Array | np.ndarray
    segments: jax.Array | np.ndarray


@flax.struct.dataclass
class Metrics:
    """Metrics of a step. Each is a float32[].

    Attributes:
        loss: the mean cross-entropy per label, before the step.
        gradient_norm: the global norm before clipping.
        learning_rate: the rate of this step.
        tokens: the number of labels.
    """

    loss: jax.Array
    gradient_norm: jax.Array
    learning_rate: jax.Array
    tokens: jax.Array


def batch_loss(
    params, batch: TrainBatch, model: ModelConfig, *, remat: bool = False, router_loss: bool = False, rngs=None
):
    """Return the summed cross-entropy of a batch and the number of its labels, both as float32[].

    With `router_loss`, the sum includes the routers' loss, once for each label.
    """
    ids, segments = jnp.asarray(batch.ids), jnp.asarray(batch.segments)
    inputs = {"attention_mask": segments > 0, "segment_ids": segments, "output_router_logits": router_loss}
    out = forward(model, params, ids, remat=remat, rngs=rngs, **inputs)
    total, count = next_token_loss(out.logits, jnp.asarray(batch.labels))
    if out.aux_loss is not None:
        total = total + (model.router_aux_loss_coef or 0.0) * out.aux_loss * count
    return total, count


def train_step(
    state: TrainState, batch: TrainBatch, frozen=None, *, model: ModelConfig, cfg: TrainConfig
) -> tuple[TrainState, Metrics]:
    """Take one training step. The function is pure; jit it with `model` and `cfg` as constants.

    Args:
        state: the state before the step; donate it if it is not needed again.
        batch: the rows of this step.
        frozen: the model's parameters if `state.params` are low-rank updates (`lora.init`); otherwise None.
        model: the model's config.
        cfg: the settings.
    """
    if has_packed(frozen):
        raise InputError("frozen has quantized weights, which do not support updates: load it with quantize='none'")
    if cfg.router_loss and model.family.experts is None:
        raise ConfigError(f"router_loss is for models with experts, which model_type {model.model_type} does not have")
    model = dataclasses.replace(model, dtype=cfg.dtype)
    dropout = jax.random.fold_in(jax.random.key(cfg.seed), state.step)

    def loss(trained, part: TrainBatch, key):
        params = trained if frozen is None else attach(frozen, trained, cfg.lora_scale)
        params = jax.tree.map(lambda leaf: leaf.astype(cfg.dtype), params)
        rngs = {"dropout": key} if model.attention_dropout > 0 else None
        return batch_loss(params, part, model, remat=cfg.remat, router_loss=cfg.router_loss, rngs=rngs)

    total, count, gradient = _accumulate(jax.value_and_grad(loss, has_aux=True), state.params, batch, dropout, cfg)
    count = jnp.maximum(count, 1.0)  # a batch without labels has a gradient of 0
    gradient = jax.tree.map(lambda leaf: leaf / count, gradient)
    with jax.numpy_dtype_promotion("standard"):
        updates, optimizer = cfg.optimizer().update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
    metrics = Metrics(total / count, optax.tree.norm(gradient), cfg.rate(state.step), count)
    return TrainState(params, optimizer, state.step + 1), metrics


def _accumulate(gradient_of: Callable, params, batch: TrainBatch, dropout, cfg: TrainConfig):
    """Return the summed loss, the number of labels and the summed gradient of all micro-batches."""
    rows, parts = batch.ids.shape[0], cfg.accumulate
    if rows % parts:
        raise InputError(f"a batch of {rows} rows cannot be divided into accumulate={parts} parts")
    if parts == 1:
        (total, count), gradient = gradient_of(params, batch, dropout)
        return total, count, gradient
    split = jax.tree.map(lambda leaf: jnp.asarray(leaf).reshape(parts, rows // parts, *leaf.shape[1:]), batch)

    def add(sums, part):
        index, micro_batch = part
        (total, count), gradient = gradient_of(params, micro_batch, jax.random.fold_in(dropout, index))
        return jax.tree.map(jnp.add, sums, (total, count, gradient)), None

    zeros = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, zeros, (jnp.arange(parts), split))[0]


def train(
    params,
    batches: Callable[[int], TrainBatch],
    *,
    model: ModelConfig,
    cfg: TrainConfig,
    frozen=None,
    directory: Path | None = None,
    run: str = "",
    save_every: int = 100,
    report_every: int = 10,
    report: Callable[[str], None] | None = None,
    evaluation: Evaluation | None = None,
):
    """Train, and return the trained parameters in float32.

    Args:
        params: the initial values of the model's parameters, or of low-rank updates.
        batches: returns the batch for a step. For a run to resume, `batches` must return the same batch for the same
            step.
        model: the model's config.
        cfg: the settings.
        frozen: as in `train_step`.
        directory: the newest two states and the state with the lowest held-out loss are saved here, and the record:
            training.jsonl and training.svg. Each process saves its own part of a state, so all processes must share
            the directory. A killed run resumes from the newest undamaged state, with bit-identical results. A finished
            run continues if `cfg.steps` is raised; `steps` and `warmup` are the only settings that may change.
        run: identifies everything else that the result depends on. A state from a different run is an error.
        save_every: the number of steps between saved states. The last state is always saved.
        report_every: the number of steps between reports.
        report: called with each line of progress.
        evaluation: measures a held-out loss during training. `keep_best` needs a directory.

    Raises:
        InputError: the state in `directory` is from a run with different settings, or all states are damaged.
        ConfigError: the loss became infinite or NaN.
    """
    mesh = mesh_of((params, frozen))
    state = replicate(TrainState.create(params, cfg), mesh)
    del params  # the state contains copies; the originals are freed once the caller drops its references
    log = RunLog(cfg.steps, directory, _settings(model, cfg, run), evaluation, report)
    if directory is not None and can_resume(directory, model=model, cfg=cfg, run=run):
        like = _shapes(state)
        del state  # frees memory for the saved state
        state = log.resume(directory, like)
    else:
        log.begin(state)
    step = int(state.step)
    while not log.is_finished(step):
        batch = batches(step)
        tokens = int(np.sum(np.asarray(batch.segments) > 0))  # counted before the rows are split across processes
        batch = jax.device_put(batch) if mesh is None else place_rows(batch, mesh)
        state, metrics = _step(state, batch, frozen, model=model, cfg=cfg)
        step += 1
        log.count(step, state, metrics, tokens, report_every=report_every, save_every=save_every)
    if directory is not None and (best := log.best()) not in (None, step):
        like = _shapes(state)
        del state
        state = read_state(directory, best, like)
    return state.params


_step = Program(train_step, static_argnames=["model", "cfg"], donate_argnames=["state"])


def can_resume(directory: Path, *, model: ModelConfig, cfg: TrainConfig, run: str = "", replace: bool = False) -> bool:
    """Return True if `train` would resume from `directory`. This only reads the notes of the newest state.

    `replace` removes the states of a finished run with other settings.

    Raises:
        InputError: the state is from a run with other settings, or from a step after the last one, or the notes of all
            states are damaged.
    """
    notes = newest_notes(directory)
    if notes is None:
        return False
    if notes["settings"] == _settings(model, cfg, run):
        if notes["step"] > cfg.steps:
            raise InputError(
                f"{directory} has the state after {notes['step']} steps, but steps is {cfg.steps}: "
                "use more steps to continue, or remove it to start again"
            )
        return True
    if replace and notes["finished"]:
        remove_states(directory)
        return False
    raise InputError(
        f"{directory} has the state of a run with other settings or data: "
        "use the same ones to resume it, or remove it to start again"
    )


def _settings(model: ModelConfig, cfg: TrainConfig, run: str) -> str:
    """Return a digest of everything that must not change when a run resumes."""
    fixed = dataclasses.replace(cfg, steps=1, warmup=0)
    return hashlib.sha256(f"{model} {fixed} {run}".encode()).hexdigest()


def _shapes(state: TrainState) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def evaluate(params, data: TrainBatch, *, model: ModelConfig, dtype: str, rows: int) -> float:
    """Return the mean cross-entropy per label of `data`, computed in `dtype` with `rows` rows at a time."""
    lacking = ((0, -data.ids.shape[0] % rows), (0, 0))  # add empty rows to the last batch, so that one program suffices
    ids, segments = np.pad(data.ids, lacking), np.pad(data.segments, lacking)
    labels = np.pad(data.labels, lacking, constant_values=-100)
    total = count = 0.0
    for start in range(0, len(ids), rows):
        part = slice(start, start + rows)
        sums = _sums(params, TrainBatch(ids[part], labels[part], segments[part]), model=model, dtype=dtype)
        total, count = total + float(sums[0]), count + float(sums[1])
    return total / count


@program("evaluate", static_argnames=["model", "dtype"])
def _sums(params, batch: TrainBatch, *, model: ModelConfig, dtype: str):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return batch_loss(params, batch, dataclasses.replace(model, dtype=dtype))
