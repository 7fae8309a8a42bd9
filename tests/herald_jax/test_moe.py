"""Expert layers against a loop over tokens, what they must not depend on, and the rules of token editing."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import herald_jax
from herald_jax import Editing, GenerateConfig, ModelConfig, MoEConfig, RopeConfig, Threshold, moe
from herald_jax.checkpoint import load_checkpoint, save_checkpoint
from herald_jax.errors import GenerationError
from herald_jax.model import flatten, param_specs, rope_angles, rotate
from herald_jax.moe import apply_experts, route
from pallas_kernels import dispatch, grouped_route, lanes_numpy
from tests.herald_jax import tiny

# SDAR's form with experts behind its first layer and half-rotated heads.
MOE = dataclasses.replace(
    tiny.SDAR,
    rope=RopeConfig(theta=1e4, rotary_dim=8),
    moe=MoEConfig(8, 3, 20, "sigmoid", True, 2.5, True, 4, 2, shared_size=24, first_dense_layers=1),
)
REQUEST = GenerateConfig(max_new_tokens=12, policy=Editing(Threshold(0.4), 0.3, 2))


LLADA2_MINI = MoEConfig(256, 8, 512, "sigmoid", True, 2.5, True, 8, 4, shared_size=512, first_dense_layers=1)
SDAR_30B = MoEConfig(128, 8, 768, "softmax", True)


def draw(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    "experts",
    [
        np.random.default_rng(0).permuted(np.tile(np.arange(5), (2, 7, 1)), axis=-1)[..., :2],
        np.full((2, 7, 1), 4),
        np.tile(np.array([3, 0]), (2, 7, 1)),
    ],
    ids=["mixed", "one expert for all", "three experts idle"],
)
def test_experts_against_a_loop_over_tokens(experts: np.ndarray) -> None:
    x, weights = draw((2, 7, 6), 1), draw(experts.shape, 2)
    gate_up, down = draw((5, 6, 2, 4), 3), draw((5, 4, 6), 4)
    expected = np.zeros((2, 7, 6))
    for b, t in np.ndindex(2, 7):
        for weight, expert in zip(weights[b, t], experts[b, t], strict=True):
            gate, up = (x[b, t].astype(np.float64) @ gate_up[expert, :, i] for i in (0, 1))
            expected[b, t] += weight * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
    found = jax.jit(apply_experts)(x, weights, experts.astype(np.int32), gate_up, down)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_best_by_comparison_are_those_of_top_k(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = jnp.asarray(np.random.default_rng(0).integers(0, 5, (2, 6, 8)).astype(np.float32))  # many ties
    values = values.at[0, 1, :5].set(-jnp.inf)
    compared = moe._best(values, k)
    monkeypatch.setattr(moe, "_COMPARED", 0)
    np.testing.assert_array_equal(compared, moe._best(values, k))
    assert int(moe._best(jnp.full((1, 2, 8), jnp.nan), k).max()) < 8


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit in float32, whatever else the experts are given; nothing is dropped however crowded an expert is."""
    x = draw((4, 8, 32), 5)
    x[2:] = x[0, 0]  # sixteen tokens that all go to the same experts
    leaves = flatten(tiny.params(MOE))
    logits = jnp.asarray(x @ leaves["layers/1/mlp/router/kernel"])
    assert MOE.moe is not None
    weights, experts = route(logits, MOE.moe, jnp.asarray(leaves["layers/1/mlp/router/bias"]))
    matrices = leaves["layers/1/mlp/experts/gate_up"], leaves["layers/1/mlp/experts/down"]
    apply = jax.jit(apply_experts)
    together = np.asarray(apply(x, weights, experts, *matrices))
    for row in range(3):
        part = slice(row, row + 1)
        alone = np.asarray(apply(x[part], weights[part], experts[part], *matrices))
        np.testing.assert_array_equal(alone[0], together[row])


def test_rows_do_not_depend_on_each_other() -> None:
    """Tokens of rows of other lengths, under token editing, alone and together, streamed and not."""
    model = tiny.model(MOE)
    prompts = tiny.prompts([3, 9, 4])
    together = herald_jax.generate(model, prompts, REQUEST)
    assert together.stats.edited_tokens > 0
    alone = [herald_jax.generate(model, [prompt], REQUEST).tokens[0] for prompt in prompts]
    assert together.tokens == alone
    streamed: list[list[int]] = [[], [], []]
    for event in herald_jax.stream(model, prompts, REQUEST):
        if isinstance(event, herald_jax.BlockEvent):
            streamed[event.row] += event.tokens
    assert streamed == together.tokens


def test_part_of_a_head_is_rotated() -> None:
    rope = RopeConfig(theta=1e4, rotary_dim=8)
    x = jnp.asarray(draw((1, 3, 2, 16), 6))
    positions = jnp.array([[0, 5, 9]])
    found = rotate(x, rope_angles(rope, 16, positions))
    np.testing.assert_array_equal(found[..., 8:], x[..., 8:])
    whole = rotate(x[..., :8], rope_angles(RopeConfig(theta=1e4), 8, positions))
    np.testing.assert_array_equal(found[..., :8], whole)


def test_checkpoints_keep_experts(tmp_path: Any) -> None:
    """In bfloat16 the router stays float32, whatever dtype is asked for when loading."""
    config: ModelConfig = dataclasses.replace(MOE, dtype="bfloat16")
    specs = param_specs(config)
    assert specs["layers/1/mlp/router/kernel"].dtype == jnp.float32
    save_checkpoint(tmp_path / "model", config, tiny.params(config))
    loaded = load_checkpoint(tmp_path / "model", dtype="float32")
    assert loaded.config == MOE
    for path, leaf in flatten(tiny.params(config)).items():
        np.testing.assert_array_equal(np.asarray(flatten(loaded.params)[path]), leaf.astype(np.float32), err_msg=path)


# -- token editing -----------------------------------------------------------------------------------------------------


def test_what_is_rewritten() -> None:
    """Strictly above the threshold, only what disagrees and may be touched; 0 means all that disagrees, not none."""
    confidence = jnp.array([[0.2, 0.5, 0.9, 0.9, 0.9]])
    changed = jnp.array([[True, True, True, False, True]])
    editable = jnp.array([[True, True, True, True, False]])

    def rewritten(policy: Editing, post: int = 0) -> list[bool]:
        flags = policy.rewrite(editable=editable, changed=changed, confidence=confidence, post=jnp.array([post]))
        return flags[0].tolist()

    assert rewritten(Editing(threshold=0.5)) == [False, False, True, False, False]
    assert rewritten(Editing(threshold=0)) == [True, True, True, False, False]
    assert rewritten(Editing(threshold=0, max_post_steps=3), post=3) == [True, True, True, False, False]
    assert rewritten(Editing(threshold=0, max_post_steps=3), post=4) == [False] * 5


def test_other_thresholds_compile_nothing() -> None:
    from herald_jax.block_loop import run_blocks

    model = tiny.model(MOE)
    prompts = tiny.prompts([3, 9, 4])
    herald_jax.generate(model, prompts, REQUEST)
    before = run_blocks._cache_size()  # type: ignore[attr-defined]
    other = dataclasses.replace(REQUEST, policy=Editing(Threshold(0.9), 0, 5))
    herald_jax.generate(model, prompts, other)
    assert run_blocks._cache_size() == before  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Editing(threshold=1.5), "editing threshold is 1.5, but a probability between 0 and 1 was expected"),
        (lambda: Editing(threshold=-0.1), "to switch editing off use the fill policy alone"),
        (lambda: Editing(max_post_steps=-1), "max_post_steps is -1, but must be a number of steps from 0 up"),
        (lambda: Editing(Editing()), "fill is Editing(...), but must be the policy that reveals masked positions"),  # type: ignore[arg-type]
        (
            lambda: herald_jax.generate(tiny.model(tiny.FAST_DLLM), [[1]], REQUEST),
            "Editing goes with families whose logits speak for their own position (LLaDA2, SDAR), not with "
            "'fast_dllm_v2'",
        ),
    ],
    ids=["above 1", "below 0", "steps", "nested", "shifted logits"],
)
def test_refusals(make: Any, sentence: str) -> None:
    with pytest.raises(GenerationError, match=re.escape(sentence)):
        make()


def test_a_nan_ends_its_row_only() -> None:
    """Among experts, too, a row of NaNs stays alone."""
    leaves = flatten(tiny.params(MOE))
    embedding = np.array(leaves["embed/embedding"])
    embedding[17] = np.nan
    params = {**tiny.params(MOE), "embed": {"embedding": embedding}}
    model = herald_jax.Model.from_params(MOE, params)
    good, bad = tiny.prompts([9, 4])
    good = [token if token != 17 else 18 for token in good]
    result = herald_jax.generate(model, [good, [17, *bad], good], REQUEST)
    assert list(result.errors) == [1]
    assert result.tokens[0] == result.tokens[2]
    assert result.tokens[0] == herald_jax.generate(tiny.model(MOE), [good], REQUEST).tokens[0]


@pytest.mark.parametrize(
    "config", [LLADA2_MINI, SDAR_30B, dataclasses.replace(SDAR_30B, renormalise=False, num_groups=2)], ids=str
)
def test_routing_kernel_in_numpy(config: MoEConfig) -> None:
    """Beside the plain form; five rows, of which one is all ties and one has a NaN."""
    logits = 2 * draw((5, config.num_experts), 3)
    logits[3], logits[4, 7] = 0.5, np.nan
    bias = 0.1 * draw((config.num_experts,), 4) if config.expert_bias else None
    choice = grouped_route.Choice(
        config.experts_per_token, config.router == "softmax", config.renormalise, config.routed_scaling,
        config.num_groups, config.groups_per_token,
    )  # fmt: skip
    weights, experts = grouped_route.choose_experts(logits, bias, choice=choice, launch=lanes_numpy.launch)
    wanted = route(jnp.asarray(logits)[None], config, None if bias is None else jnp.asarray(bias))
    np.testing.assert_array_equal(experts[:4], np.asarray(wanted[1])[0, :4])
    np.testing.assert_allclose(weights[:4], np.asarray(wanted[0])[0, :4], rtol=2e-6)
    assert len(set(experts[4].tolist())) == config.experts_per_token
    assert experts.min() >= 0
    assert experts.max() < config.num_experts
    if config.renormalise:
        assert np.isnan(weights[4]).any()


def test_what_the_routing_kernel_does_not_do() -> None:
    for experts, groups, k in ((64, 1, 8), (256, 64, 8), (256, 8, 33)):
        logits = jax.ShapeDtypeStruct((1, 32, experts), jnp.float32)
        missing = dispatch.choose_experts_missing(logits, groups, k) or ""
        assert f"not {experts} experts in {groups} groups and {k}" in missing
