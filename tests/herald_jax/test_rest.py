"""What MAGE's later steps get of the entries that were not selected."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax import Mage
from herald_jax.cache import DeviceKV
from herald_jax.mage import MageAttend, MageKV
from herald_jax.mage_steps import finish_selection
from herald_jax.model import bind
from herald_jax.prefill import prefill
from herald_jax.rest import Rest
from tests.herald_jax import tiny


def attention(scores, values, seen):
    """Softmax attention and lse, float64: scores [B, M, H, N], values [B, N, H, D], seen bool[B, 1, H, N]."""
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    lse = np.log(weights.sum(axis=-1)) + top[..., 0]
    return np.einsum("bmhn,bnhd->bmhd", weights / weights.sum(axis=-1, keepdims=True), values), lse


def test_the_rest_is_the_attention_over_what_was_left_out():
    rng = np.random.default_rng(0)
    config = dataclasses.replace(tiny.SDAR, num_layers=1)
    b, m, h, n, d = 3, config.diffusion.block_length, config.num_heads, 40, config.head_dim
    scores, values = 2 * rng.normal(size=(b, m, h, n)), rng.normal(size=(b, n, h, d))
    seen = rng.random((b, 1, h, n)) < 0.4
    seen[1] = True  # a row that left nothing out
    scores[2, 0][:, ~seen[2, 0, 0]] -= 40  # a query whose rest is nothing
    seen[2] = seen[2, :, :1]
    left = ~seen
    left[1] = True  # anything: it is not to be used
    exact, part, rest = (attention(scores, values, which) for which in (np.ones_like(seen), seen, left))

    def of(pair):
        return tuple(jnp.asarray(x, jnp.float32) for x in pair)

    everything = jnp.array([False, True, False])
    out, lse = of(part)
    noted = Rest.empty(config, b).noted(0, jnp.zeros((b, m, h, d)), *of(exact))
    kept = noted.without(out[None], lse[None], everything[None])
    some = np.ones((b, m, h), bool)
    some[1], some[2, 0] = False, False
    assert (np.isfinite(np.asarray(kept.lse[0])) == some).all()
    np.testing.assert_allclose(np.asarray(kept.lse[0])[some], rest[1][some], atol=1e-5)
    np.testing.assert_allclose(np.asarray(kept.out[0])[some], rest[0][some], atol=2e-4)

    # Another query's attention over the selection, joined as log-sum-exp joins it with the rest.
    now = attention(scores + rng.normal(size=scores.shape), values, seen)
    same = np.array(rng.random((b, m)) < 0.5)
    got = np.asarray(kept.joined(0, *of(now), jnp.asarray(same)))
    share = np.where(some & same[..., None], 1 / (1 + np.exp(now[1] - rest[1])), 0)[..., None]
    np.testing.assert_allclose(got, (1 - share) * now[0] + share * np.where(share, rest[0], 0), atol=2e-4)
    untouched = np.broadcast_to(share == 0, got.shape)
    np.testing.assert_array_equal(got[untouched], of(now)[0][untouched])


def test_a_step_whose_inputs_are_the_selecting_ones_is_exact():
    """By hidden states, over three layers: they see each other's outputs. A changed position does without its rest."""
    config = dataclasses.replace(tiny.SDAR, num_layers=3)
    params = jax.tree.map(jnp.asarray, tiny.params(config))
    block = config.diffusion.block_length
    tokens = jax.random.randint(jax.random.key(1), (2, 32), 0, tiny.MASK)
    prefix = jnp.array([24, 8], jnp.int32)
    cache, _ = prefill(
        params, DeviceKV.empty(config, 2, 64), np.asarray(tokens), np.asarray(prefix), config=config, chunk=32
    )
    canvas = jnp.full((2, block), tiny.MASK, jnp.int32).at[:, 0].set(tokens[:, 30])
    visible, rows = prefix[:, None] + block, canvas == tiny.MASK
    positions = prefix[:, None] + jnp.arange(block)[None]

    @jax.jit
    def run(kv, attend):
        return bind(config, params)(canvas, positions, attend, kv)

    def sparse(plan, same):
        kv = MageKV.around(cache, plan, config, 32, None)
        exact, kv = run(kv, MageAttend(prefix, visible, rows, plan, sparse=False))
        kv = finish_selection(kv, plan, prefix, None, None)
        return exact, run(kv, MageAttend(prefix, visible, rows, plan, sparse=True, same=same))[0]

    few = Mage(0.2, dense_layers=0, min_budget=1, rest="keep", page_size=2)
    exact, kept = sparse(few, jnp.ones((2, block), bool))
    np.testing.assert_allclose(kept, exact, atol=1e-5)
    dropped = sparse(dataclasses.replace(few, rest="drop"), None)[1]
    assert np.abs(np.asarray(dropped - exact)).max(axis=-1).min() > 1e-3
    one = jnp.ones((2, block), bool).at[0, 1].set(False)
    changed = np.abs(np.asarray(sparse(few, one)[1] - exact)).max(axis=-1)
    assert changed[0].min() > 1e-5  # by what the others see of it
    assert changed[0].argmax() == 1
    assert changed[1].max() < 1e-5
