"""Predictions, draws and policies against NumPy and plain Python loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import EntropyBound, GenerationError, Sequential, StaticLowConfidence, Threshold, denoise
from herald_jax.denoise import Policy, Prediction, Sampling, schedule
from tests.herald_jax import plain

ROWS, BLOCK = 64, 8
draw = jax.jit(denoise.draw)


def predict(*args: Any) -> Prediction:
    """`denoise.predict`, compiled anew: HEAD_ROWS is read while tracing."""
    return jax.jit(lambda *args: denoise.predict(*args))(*args)


POLICIES: tuple[Policy, ...] = (
    StaticLowConfidence(),
    StaticLowConfidence(3),
    Threshold(0.5),
    Threshold(0.3, steps=3),
    Threshold(1.0, steps=20),
    EntropyBound(0.6),
    EntropyBound(0.0),
    EntropyBound(1.2, steps=4),
    Sequential(),
    Sequential(3),
)


def policy_inputs() -> dict[str, np.ndarray]:
    """Random rows with many ties; rows 0 and 1 have nothing and one thing eligible, later steps have few masks left."""
    rng = np.random.default_rng(0)
    eligible = rng.random((ROWS, BLOCK)) < rng.random((ROWS, 1))
    eligible[0], eligible[1], eligible[2] = False, np.arange(BLOCK) == 5, True
    return {
        "eligible": eligible,
        "confidence": (rng.integers(0, 6, (ROWS, BLOCK)) / 5).astype(np.float32),
        "entropy": (rng.integers(0, 8, (ROWS, BLOCK)) / 8).astype(np.float32),  # sums are exact in float32
        "step": rng.integers(0, 6, ROWS).astype(np.int32),
    }


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_policy_equals_a_python_loop(policy: Policy) -> None:
    inputs = policy_inputs()
    got = np.asarray(jax.jit(policy, static_argnames="block_length")(**inputs, block_length=BLOCK))
    for row in range(ROWS):
        step = int(inputs["step"][row])
        eligible = np.flatnonzero(inputs["eligible"][row]).tolist()
        wanted = plain.reveal(policy, eligible, inputs["confidence"][row], inputs["entropy"][row], step, BLOCK)
        assert set(np.flatnonzero(got[row])) == wanted, (row, inputs["confidence"][row], eligible, step)
        assert not eligible or len(wanted) >= min(1, plain.quota(BLOCK, policy.steps, step))


def test_policies_never_reveal_what_is_not_eligible() -> None:
    """Known positions of high confidence, NaN in rows of no interest: neither counts nor is chosen."""
    inputs = policy_inputs()
    inputs["confidence"][~inputs["eligible"]] = 2.0
    inputs["entropy"][~inputs["eligible"]] = np.nan
    for policy in POLICIES:
        got = np.asarray(jax.jit(policy, static_argnames="block_length")(**inputs, block_length=BLOCK))
        assert not np.any(got & ~inputs["eligible"])
        assert not got[0].any()
        assert got[1].tolist() == [False] * 5 + [True] + [False] * 2


@pytest.mark.parametrize("block", [1, 4, 7, 32])
def test_schedule_spreads_the_block_over_the_steps(block: int) -> None:
    for steps in (None, 1, 2, 3, 5, 7, 8, 31, 32, 100):
        count = min(steps or block, block)
        shares = np.asarray(schedule(jnp.arange(40), block, steps))
        assert shares[:count].sum() == block
        assert np.ptp(shares[:count]) <= 1
        assert (np.diff(shares) <= 0).all()
        # Sub-blocks can need more steps than planned: those go on with the smaller share, at least one position.
        assert shares.tolist() == [plain.quota(block, steps, step) for step in range(40)]
        assert shares.min() >= 1


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: StaticLowConfidence(0), "steps is 0, but must be a positive number of steps per block"),
        (lambda: Sequential(-1), "steps is -1, but"),
        (lambda: Threshold(0.9, steps=2.5), "steps is 2.5, but"),  # type: ignore[arg-type]
        (lambda: EntropyBound(0.1, steps=0), "steps is 0, but"),
        (lambda: Threshold(1.01), "threshold is 1.01, but a probability between 0 and 1 was expected"),
        (lambda: Threshold(-0.1), "threshold is -0.1, but"),
        (lambda: Threshold(float("nan")), "threshold is nan, but"),
        (lambda: Threshold("high"), "threshold is 'high', but a probability"),
        (lambda: Sequential("two"), "steps is 'two', but"),
        (lambda: EntropyBound(-1), "entropy bound is -1, but a number of nats from 0 up was expected"),
        (lambda: EntropyBound(float("inf")), "entropy bound is inf, but"),
    ],
)
def test_policies_refuse(make: Any, sentence: str) -> None:
    with pytest.raises(GenerationError, match=sentence.replace("(", r"\(").replace(".", r"\.")):
        make()


def test_numbers_are_leaves() -> None:
    """Thresholds and steps may change without compiling anew; naming steps at all is another program."""
    assert jax.tree.leaves([Threshold(0.25, steps=3), EntropyBound(1), Sequential(2)]) == [0.25, 3, 1.0, 2]
    assert jax.tree.structure(Threshold(0.25, 2)) == jax.tree.structure(Threshold(1, 7))
    assert (
        jax.tree.structure(Threshold(0.25)) == jax.tree.structure(Threshold(1)) != jax.tree.structure(Threshold(1, 2))
    )
    assert type(Threshold(1).threshold) is type(EntropyBound(1).bound) is float


def keys_for(seed: int, *shape: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), shape)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.5, 0, 0.6), (1.3, 6, 0.7), (1.0, 1, 1.0), (1.0, 0, 1e-6), (1.0, 40, 0.999999)],
)
def test_draws_stay_in_the_support_and_reach_all_of_it(temperature: float, top_k: int, top_p: float) -> None:
    """Per row: the set of drawn tokens is NumPy's, and their frequencies those of its softmax (chi-squared)."""
    vocab, rows, draws = 11, 4, 3000
    logits = np.random.default_rng(1).normal(size=(rows, vocab)).astype(np.float32)
    sampling = Sampling.of(temperature, top_k, top_p)
    many = jax.jit(jax.vmap(lambda keys: draw(jnp.asarray(logits), keys, sampling)))
    got = np.asarray(many(keys_for(2, draws, rows)))
    for row in range(rows):
        scaled = (logits[row] - logits[row].max()) / np.float32(temperature)
        allowed = plain.support(scaled, top_k, top_p)
        odds = np.where(allowed, np.exp(scaled.astype(np.float64)), 0)
        odds /= odds.sum()
        counts = np.bincount(got[:, row], minlength=vocab)
        assert not counts[~allowed].any()
        assert counts[odds > 0.005].all()
        excess = np.sum((counts - draws * odds)[allowed] ** 2 / (draws * odds[allowed]))
        assert excess < allowed.sum() + 5 * np.sqrt(2 * allowed.sum())


def test_draws_of_a_row_are_its_own() -> None:
    """Same key and logits, other neighbours: the same token. Top-p looks at every row, not at row 0 (Fast-dLLM#64)."""
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(size=(6, 50)) * np.array([[8.0], [0.1], [1.0], [3.0], [0.5], [2.0]]), jnp.float32)
    sampling = Sampling.of(1.2, 20, 0.8)
    keys = keys_for(4, 6)
    together = np.asarray(draw(logits, keys, sampling))
    alone = [int(draw(logits[row : row + 1], keys[row : row + 1], sampling)[0]) for row in range(6)]
    assert together.tolist() == alone
    order = jnp.asarray([3, 0, 5, 2, 1, 4])
    assert np.asarray(draw(logits[order], keys[order], sampling)).tolist() == together[np.asarray(order)].tolist()


def test_greedy_takes_the_lowest_of_the_largest() -> None:
    logits = jnp.asarray([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]], jnp.float32)
    for temperature in (0.0, 1e-45, 1e-40):  # float32 cannot divide by the last two
        sampling = Sampling.of(temperature, 3, 0.5)
        assert sampling.greedy
        assert np.asarray(draw(logits, keys_for(0, 2), sampling)).tolist() == [1, 0]
    assert np.asarray(draw(logits, None, Sampling.of(1.0, 0, 1.0))).tolist() == [1, 0]


def test_small_temperatures_approach_greedy_without_overflow() -> None:
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(32, 40)) * 100, jnp.float32)
    best = np.asarray(jnp.argmax(logits, axis=-1)).tolist()
    for temperature in (1e-37, 1e-20, 1e-3):
        for top_p in (1.0, 0.9):
            drawn = draw(logits, keys_for(6, 32), Sampling.of(temperature, 0, top_p))
            assert np.asarray(drawn).tolist() == best


def test_rows_flagged_greedy_are_not_drawn() -> None:
    logits = jnp.asarray(np.random.default_rng(7).normal(size=(200, 30)), jnp.float32)
    flags = np.arange(200) % 2 == 0
    sampling, keys = Sampling.of(5.0, 10, 0.9), keys_for(8, 200)
    free = np.asarray(draw(logits, keys, sampling))
    mixed = np.asarray(draw(logits, keys, sampling, jnp.asarray(flags)))
    best = np.asarray(jnp.argmax(logits, axis=-1))
    assert (mixed[flags] == best[flags]).all()
    assert (mixed[~flags] == free[~flags]).all()
    assert (free[flags] != best[flags]).mean() > 0.5


def hidden_and_kernel(batch: int, length: int, vocab: int = 77, size: int = 24) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(9)
    hidden = rng.normal(size=(batch, length, size)) * rng.uniform(0.1, 6, size=(batch, length, 1))
    return jnp.asarray(hidden, jnp.float32), jnp.asarray(rng.normal(size=(vocab, size)) / 5, jnp.float32)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_confidence_and_entropy_are_those_of_the_raw_softmax(temperature: float) -> None:
    """In float64, whatever the temperature and the filters; a filtered softmax would make every confidence 1."""
    hidden, kernel = hidden_and_kernel(3, 7)
    result = predict(hidden, kernel, Sampling.of(temperature, 1, 0.5), keys_for(10, 3, 7))
    logits = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64).T
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    odds /= odds.sum(-1, keepdims=True)
    assert np.asarray(result.token).tolist() == logits.argmax(-1).tolist()  # top_k = 1
    np.testing.assert_allclose(result.confidence, odds.max(-1), rtol=2e-5)
    np.testing.assert_allclose(result.entropy, -(odds * np.log(odds)).sum(-1), rtol=2e-5, atol=1e-5)
    assert np.ptp(result.confidence) > 0.5


def test_confidence_of_a_sampled_token_is_its_own() -> None:
    hidden, kernel = hidden_and_kernel(4, 8)
    result = predict(hidden, kernel, Sampling.of(3.0, 0, 1.0), keys_for(11, 4, 8))
    logits = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64).T
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    odds /= odds.sum(-1, keepdims=True)
    token = np.asarray(result.token)
    assert (token != odds.argmax(-1)).any()
    np.testing.assert_allclose(result.confidence, np.take_along_axis(odds, token[..., None], -1)[..., 0], rtol=5e-5)


@pytest.mark.parametrize(("shape", "temperature"), [((3, 7), 1.1), ((4, 4), 1.1), ((5, 1), 0.0)])
def test_chunked_rows_equal_whole_ones(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], temperature: float
) -> None:
    """More rows than HEAD_ROWS, divisible by it or not."""
    hidden, kernel = hidden_and_kernel(*shape)
    sampling, keys = Sampling.of(temperature, 9, 0.9), keys_for(12, *shape)
    flags = jnp.asarray(np.random.default_rng(13).random(shape) < 0.3)
    whole = predict(hidden, kernel, sampling, keys, flags)
    monkeypatch.setattr(denoise, "HEAD_ROWS", 4)
    parts = predict(hidden, kernel, sampling, keys, flags)
    assert np.asarray(parts.token).tolist() == np.asarray(whole.token).tolist()
    np.testing.assert_allclose(parts.confidence, whole.confidence, rtol=1e-6)
    np.testing.assert_allclose(parts.entropy, whole.entropy, rtol=1e-6, atol=1e-6)
    assert np.asarray(parts.token).shape == shape


def test_nan_and_infinite_logits_show_in_the_confidence() -> None:
    """Of their own row only. An infinite logit is an overflow: it has no probability either."""
    hidden, kernel = hidden_and_kernel(2, 4)
    hidden = hidden.at[0, 1, 3].set(jnp.nan).at[1, 2].set(jnp.inf)
    for sampling, keys in ((Sampling.of(0.0, 0, 1.0), None), (Sampling.of(0.8, 5, 0.9), keys_for(14, 2, 4))):
        result = predict(hidden, kernel, sampling, keys)
        bad = [[False, True, False, False], [False, False, True, False]]
        assert np.isnan(result.confidence).tolist() == bad
        assert np.isnan(result.entropy).tolist() == bad
        assert np.asarray((result.token >= 0) & (result.token < 77)).all()


def test_minus_infinite_logits_weigh_nothing() -> None:
    """A head row that is masked out leaves a finite entropy."""
    kernel = jnp.asarray([[1.0], [-jnp.inf], [2.0]], jnp.float32)
    result = predict(jnp.ones((1, 1, 1), jnp.float32), kernel, Sampling.of(0.0, 0, 1.0))
    odds = np.exp([1.0, 2.0]) / np.exp([1.0, 2.0]).sum()
    np.testing.assert_allclose(result.confidence[0, 0], odds[1], rtol=1e-6)
    np.testing.assert_allclose(result.entropy[0, 0], -(odds * np.log(odds)).sum(), rtol=1e-5)


def test_bfloat16_heads_are_accumulated_in_float32() -> None:
    """Logits differ by less than a bfloat16 step: only float32 accumulation and softmax tell them apart."""
    hidden = jnp.ones((1, 1, 512), jnp.bfloat16)
    kernel = jnp.full((2, 512), 0.5, jnp.bfloat16).at[1, :3].add(0.01)
    result = predict(hidden, kernel, Sampling.of(0.0, 0, 1.0))
    gap = float(jnp.sum(kernel[1].astype(jnp.float32)) - 256)
    assert 0 < gap < 0.1  # bfloat16 has steps of 2 there
    assert int(result.token[0, 0]) == 1
    np.testing.assert_allclose(result.confidence[0, 0], 1 / (1 + np.exp(-gap)), rtol=1e-5)
