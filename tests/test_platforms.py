"""Programs do not depend on where they are traced: one trace is lowered and exported for all platforms."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxgen import GenerationConfig, generate
from jaxgen.core.decoding.modes import MODES
from tests.support.models import model_config, random_params, slow

PLATFORMS = ("cpu", "cuda", "tpu")
WIDTH = 48
MODEL = model_config(torch_dtype="bfloat16", hidden_size=WIDTH)
PARAMS = random_params(MODEL)
IDS = jnp.asarray([[3, 4, 5]], jnp.int32)
OPTIONS = {"greedy": {}, "sample": {"do_sample": True, "top_k": 5, "top_p": 0.9}, "guided": {"guidance_scale": 1.5}}
OTHER_MODES = {
    "beam_search": {"num_beams": 2},
    "beam_sample": {"num_beams": 2, "do_sample": True},
    "group_beam_search": {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "constrained_beam_search": {"num_beams": 2, "force_words_ids": [[7, 8]]},
    "contrastive_search": {"penalty_alpha": 0.6, "top_k": 3},
    "assisted_generation": {"assistant_early_exit": 1},
    "prompt_lookup": {"prompt_lookup_num_tokens": 2},
    "dola_generation": {"dola_layers": [1], "repetition_penalty": 1.2},
}

# Products of one or two rows with a weight, and a branch that begins by creating rows of NaN.
TWO_ROWS = re.compile(rf"dot_general .*\(tensor<2x{WIDTH}xbf16>, tensor<\d+x{WIDTH}xbf16>\)")
ONE_ROW = re.compile(rf"dot_general .*\(tensor<1x{WIDTH}xbf16>, tensor<\d+x{WIDTH}xbf16>\)")
WEIGHT_FIRST = re.compile(rf"dot_general .*\(tensor<\d+x{WIDTH}xbf16>, tensor<2x{WIDTH}xbf16>\)")
EMPTY_LOOK_UP = re.compile(
    r"\"stablehlo\.case\"\(%\w+\) \(\{\s*%\w+ = stablehlo\.constant dense<0x7FC0> : tensor<bf16>\s*"
    rf"%\w+ = stablehlo\.broadcast_in_dim .* -> tensor<\dx\dx{WIDTH}xbf16>"
)


def run_of(mode: str):
    """Return a function that runs `generate` on given parameters, ids and key data."""
    cfg = GenerationConfig(model=MODEL, max_new_tokens=4, eos_token_id=1, **(OPTIONS | OTHER_MODES)[mode])

    def run(params, ids, key_data):
        key = jax.random.wrap_key_data(key_data) if cfg.do_sample else None
        return generate(params, ids, key, cfg).sequences

    return jax.jit(run)


def arguments():
    return PARAMS, IDS, jax.random.key_data(jax.random.key(7))


def lowered(mode: str) -> dict[str, str]:
    """Return the program for each platform, all lowered from one trace."""
    traced = run_of(mode).trace(*arguments())
    return {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in PLATFORMS}


@pytest.mark.parametrize("mode", ["greedy", "guided", *slow("sample")])
def test_cpu_forms_are_used_only_on_cpus(mode):
    programs = lowered(mode)
    assert len(EMPTY_LOOK_UP.findall(programs["cpu"])) == 2  # one in prefill, one in the loop
    # With guidance, a prompt has two streams, so its products have two rows. Otherwise a row of zeros is added.
    assert WEIGHT_FIRST.search(programs["cpu"])
    assert not ONE_ROW.search(programs["cpu"])
    for platform in ("cuda", "tpu"):
        assert not EMPTY_LOOK_UP.search(programs[platform])
        assert not WEIGHT_FIRST.search(programs[platform])
        if mode != "guided":
            assert bool(ONE_ROW.search(programs[platform])) == (platform == "tpu")  # a GPU uses sums
            assert not TWO_ROWS.search(programs[platform])


def test_all_modes_are_listed():
    assert OTHER_MODES.keys() | {"greedy_search", "sample"} == MODES.keys()


@pytest.mark.parametrize("mode", slow(*OTHER_MODES))
def test_one_trace_of_a_mode_is_lowered_for_all_platforms(mode):
    cfg = GenerationConfig(model=MODEL, max_new_tokens=4, eos_token_id=1, **OTHER_MODES[mode])
    assert cfg.mode == mode
    assert all("while" in program for program in lowered(mode).values())


@pytest.mark.parametrize("mode", slow("greedy", "guided", "sample"))
def test_one_export_serves_all_platforms(mode):
    run = run_of(mode)
    exported = export.export(run, platforms=PLATFORMS)(*arguments())
    assert exported.platforms == PLATFORMS
    np.testing.assert_array_equal(exported.call(*arguments()), run(*arguments()))
