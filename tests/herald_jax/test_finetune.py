"""The training objective: against a public implementation, against inference, and as gradients.

The loss's expected value is turbo-dllm's Fast-dLLM v2 objective over transformers' logits (tests/oracles/training.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import herald_jax
from herald_jax import joined_layers, lora, train_attention, training
from herald_jax.cache import DeviceKV
from herald_jax.config import ModelConfig
from herald_jax.errors import ConfigError
from herald_jax.finetune_step import LossOptions, block_loss
from herald_jax.mage import MageAttend, MageKV
from herald_jax.mage_steps import finish_selection
from herald_jax.model import bind, flatten
from herald_jax.objective import TrainBatch, corrupt, embed, noisy_hidden, token_loss
from herald_jax.plans import Mage
from herald_jax.prefill import prefill
from herald_jax.train_attention import TrainAttend
from tests.herald_jax import tiny
from tests.herald_jax.conftest import ORACLES


def head(config: ModelConfig, params: dict[str, Any]) -> jax.Array:
    return params["embed"]["embedding"] if config.tie_word_embeddings else params["head"]["kernel"]


@functools.partial(jax.jit, static_argnames=("config", "remat", "scan"))
def nll(config: ModelConfig, params: Any, batch: TrainBatch, remat: bool = False, scan: bool = True) -> Any:
    """(loss, per-token loss) of the exact objective."""
    attend = TrainAttend(batch.first, batch.at, batch.masked, batch.every_block)
    hidden, _ = noisy_hidden(config, params, batch, attend, remat=remat, scan=scan)
    found = token_loss(config, head(config, params), hidden, batch)
    return found.mean(), found.nll * found.weight


@pytest.mark.parametrize("name", ["fast-dllm-v2", "sdar"])
def test_loss_is_the_public_implementations(name: str, oracle_model: Callable[..., herald_jax.Model]) -> None:
    """Two complementary views against one clean sequence give what they give in rows of their own."""
    recorded = np.load(ORACLES / "training.npz")
    model = oracle_model(name, 8)
    tokens = recorded["tokens"].astype(np.int32)
    rows, length = tokens.shape
    views = recorded["masked"].reshape(2, rows, length // 8, 8)
    batch = corrupt(jax.random.key(0), jnp.asarray(tokens), model.config.diffusion)
    batch = dataclasses.replace(batch, masked=jnp.concatenate([*views], axis=1))
    assert (recorded["masked"][:rows] ^ recorded["masked"][rows:])[recorded["supervised"]].all()
    loss, _ = nll(model.config, model.params, batch)
    np.testing.assert_allclose(loss, recorded[f"{name}/loss"], rtol=2e-5)


def some_batch(config: ModelConfig = tiny.SDAR, length: int = 32) -> TrainBatch:
    tokens = jax.random.randint(jax.random.key(1), (2, length), 0, tiny.MASK)
    return corrupt(jax.random.key(2), tokens, config.diffusion)


def test_noise_is_complementary_and_respects_what_is_given() -> None:
    tokens = jnp.zeros((3, 64), jnp.int32)
    maskable = jax.random.bernoulli(jax.random.key(0), 0.7, (3, 64))
    batch = corrupt(jax.random.key(1), tokens, tiny.SDAR.diffusion, maskable=maskable)
    first, second = np.split(np.asarray(batch.masked), 2, axis=1)
    np.testing.assert_array_equal(first ^ second, maskable.reshape(3, 16, 4))
    assert not (first & second).any()
    # A level per block: wholly and barely masked blocks both occur, and about half of all tokens are masked.
    shares = np.asarray(corrupt(jax.random.key(2), jnp.zeros((64, 64), jnp.int32), tiny.SDAR.diffusion).masked)
    assert 0.4 < shares[:, :16].mean() < 0.6
    assert {0, 4} <= set(shares[:, :16].sum(axis=-1).ravel().tolist())
    whole = corrupt(jax.random.key(2), tokens, tiny.SDAR.diffusion, maskable=maskable, full=1.0, complementary=False)
    np.testing.assert_array_equal(whole.masked, maskable.reshape(3, 16, 4))


def test_bad_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="30 tokens, but a multiple of the block length 4"):
        corrupt(jax.random.key(0), jnp.zeros((1, 30), jnp.int32), tiny.SDAR.diffusion)
    with pytest.raises(ConfigError, match="no mask token"):
        corrupt(jax.random.key(0), jnp.zeros((1, 30), jnp.int32), tiny.LLAMA.diffusion)


@pytest.mark.once
def test_every_way_to_run_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scanned or unrolled, recomputed or kept, in chunks or not, all blocks in order or named one by one."""
    config = tiny.FAST_DLLM
    batch = some_batch(config)
    params = jax.tree.map(jnp.asarray, tiny.params(config))
    plain, tokens = nll(config, params, batch)
    other, others = nll(config, params, dataclasses.replace(batch, every_block=False), remat=True, scan=False)
    np.testing.assert_allclose(plain, other, rtol=1e-5)
    np.testing.assert_allclose(tokens, others, atol=2e-4)
    for name in ("CLEAN_CHUNK", "NOISY_CHUNK"):
        monkeypatch.setattr(train_attention, name, 12)  # rounded down to a block of 8
    chunked, others = jax.jit(functools.partial(nll.__wrapped__, config))(params, batch)
    np.testing.assert_allclose(plain, chunked, rtol=1e-5)
    np.testing.assert_allclose(tokens, others, atol=2e-4)


@pytest.mark.once
def test_chosen_blocks_have_the_loss_they_have_among_all() -> None:
    """Copying some blocks only, in any order, changes nothing for those that are copied."""
    config, batch = tiny.SDAR, some_batch()
    params = jax.tree.map(jnp.asarray, tiny.params(config))
    _, tokens = nll(config, params, batch)
    pick = jnp.array([[5, 2, 13], [0, 7, 7]])

    def take(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, pick.reshape(pick.shape + (1,) * (x.ndim - 2)), axis=1)

    some = dataclasses.replace(
        batch, at=take(batch.at), masked=take(batch.masked), weight=take(batch.weight), every_block=False
    )
    np.testing.assert_allclose(nll(config, params, some)[1], take(tokens), atol=2e-4)


def test_documents_in_one_row_do_not_see_each_other() -> None:
    """Two documents packed into a row cost what each costs alone."""
    config = tiny.SDAR
    params = jax.tree.map(jnp.asarray, tiny.params(config))
    alone = some_batch(length=32)
    _, tokens = nll(config, params, alone)
    row = alone.tokens.reshape(1, 64)
    first = jnp.repeat(jnp.array([0, 8], jnp.int32), 8)[None]
    at = jnp.concatenate([alone.at[:1], alone.at[1:] + 8], axis=1)
    packed = TrainBatch(
        row, alone.positions.reshape(1, 64), first, at, alone.masked.reshape(1, 32, 4),
        alone.weight.reshape(1, 32, 4),
    )  # fmt: skip
    np.testing.assert_allclose(nll(config, params, packed)[1], tokens.reshape(1, 32, 4), atol=2e-4)


@pytest.mark.once
def test_gradient_is_the_slope() -> None:
    """Along random directions, the gradient of the float32 loss is its central difference; nothing is left out."""
    config = tiny.FAST_DLLM
    batch = some_batch(config, 16)
    params = jax.tree.map(jnp.asarray, tiny.params(config))

    value = jax.jit(jax.value_and_grad(lambda p: nll(config, p, batch)[0]))
    gradient = value(params)[1]
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient))
    for seed in range(3):
        keys = jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params)))
        directions = [jax.random.normal(k, x.shape) * 1e-3 for k, x in zip(keys, jax.tree.leaves(params), strict=True)]
        direction = jax.tree.unflatten(jax.tree.structure(params), directions)
        ends = [value(jax.tree.map(lambda p, d, s=s: p + s * d, params, direction))[0] for s in (1.0, -1.0)]
        slope = sum(jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), directions, strict=True))
        np.testing.assert_allclose((ends[0] - ends[1]) / 2, slope, rtol=0.02, atol=2e-5)


def test_embedding_gradient_is_the_scatter_add() -> None:
    table = jax.random.normal(jax.random.key(0), (50, 8))
    tokens = jax.random.randint(jax.random.key(1), (3, 12), 0, 50)
    weight = jax.random.normal(jax.random.key(2), (3, 12, 8))
    ours = jax.grad(lambda t: jnp.sum(embed(t, tokens) * weight))(table)
    plain = jnp.zeros_like(table).at[tokens].add(weight)
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


# --- MAGE ---------------------------------------------------------------------------------------------------------

PLAN = Mage(budget=5, min_budget=1, dense_layers=1)


@pytest.mark.parametrize("plan", [PLAN, dataclasses.replace(PLAN, query="center", reduce="max", normalise="prefix")])
def test_training_chooses_what_generation_chooses(plan: Mage) -> None:
    """The entries of the no-gradient pass are those of the block loop's own selection over the same noisy block."""
    config = tiny.SDAR
    params = jax.tree.map(jnp.asarray, tiny.params(config))
    tokens = jax.random.randint(jax.random.key(1), (1, 32), 0, tiny.MASK)
    batch = corrupt(jax.random.key(2), tokens, config.diffusion, complementary=False, full=1.0)
    attend = TrainAttend(batch.first, batch.at, batch.masked, True, mode="select", plan=plan)
    hidden, chosen = jax.jit(lambda p: noisy_hidden(config, p, batch, attend))(params)
    assert chosen is not None
    block = 6  # 24 tokens before it
    cache = DeviceKV.empty(config, 1, 64)
    lengths = np.array([block * 4], np.int32)
    cache, _ = prefill(params, cache, np.asarray(tokens), lengths, config=config, chunk=32)
    kv = MageKV.around(cache, plan, config, 32, None)
    rows = jnp.ones((1, 4), bool) if plan.query == "all" else jnp.array([1], jnp.int32)
    selecting = MageAttend(jnp.array([24]), jnp.array([[28]]), rows, plan, sparse=False)
    canvas = jnp.full((1, 4), tiny.MASK, jnp.int32)
    theirs, kv = bind(config, params)(canvas, 24 + jnp.arange(4)[None], selecting, kv)
    kv = finish_selection(kv, plan, jnp.array([24]), None, None)
    np.testing.assert_allclose(hidden[0, block], theirs[0], atol=1e-4)
    for head_index in range(config.num_kv_heads):
        indices = np.asarray(kv.indices[1, 0, head_index])
        assert set(np.flatnonzero(chosen[1, 0, block, head_index])) == set(indices[indices >= 0])


def test_mage_loss() -> None:
    """With everything chosen the sparse pass is the exact one; with little, it differs, and KL has a gradient."""
    config, batch = tiny.SDAR, some_batch()
    params = jax.tree.map(jnp.asarray, tiny.params(config))

    def options(budget: int) -> LossOptions:
        return LossOptions(dataclasses.replace(PLAN, budget=budget), kl=2.0, remat=False)

    loss, parts = jax.jit(lambda p: block_loss(config, p, batch, options(1000)))(params)
    np.testing.assert_allclose(loss, nll(config, params, batch)[0], rtol=1e-5)
    assert float(parts["kl"]) < 1e-5
    step = jax.jit(jax.value_and_grad(lambda p: block_loss(config, p, batch, options(3)), has_aux=True))
    (loss, parts), gradient = step(params)
    assert float(parts["kl"]) > 0.01
    np.testing.assert_allclose(loss, parts["ce"] + 2 * parts["kl"], rtol=1e-6)
    # Down the gradient both go: the teacher moves too, so the slope is only that of a constant teacher to first order.
    moved = jax.tree.map(lambda p, g: p - 1e-4 * g, params, gradient)
    assert float(step(moved)[0][0]) < float(loss)


@pytest.mark.once
def test_the_teacher_takes_no_gradient() -> None:
    """The gradient is that of the sparse pass alone, beside the exact pass's entries and predictions as constants."""
    config, batch = tiny.SDAR, some_batch()
    params = jax.tree.map(jnp.asarray, tiny.params(config))
    plan = dataclasses.replace(PLAN, budget=3)
    attend = TrainAttend(batch.first, batch.at, batch.masked, batch.every_block, plan=plan, mode="select")
    exact, chosen = jax.jit(lambda p: noisy_hidden(config, p, batch, attend))(params)
    teacher = jax.nn.log_softmax(jnp.einsum("bsme,ve->bsmv", exact, head(config, params), precision="highest"))
    weight = batch.weight * batch.masked

    def loss(p: Any) -> jax.Array:
        hidden, _ = noisy_hidden(config, p, batch, dataclasses.replace(attend, mode="sparse"), chosen)
        ours = jax.nn.log_softmax(jnp.einsum("bsme,ve->bsmv", hidden, head(config, p), precision="highest"))
        nll = -jnp.take_along_axis(ours, batch.targets()[..., None], axis=-1)[..., 0]
        divergence = jnp.sum(jnp.exp(ours) * (ours - teacher), axis=-1)
        return jnp.sum((nll + 2 * divergence) * weight) / jnp.sum(weight)

    found = jax.jit(jax.grad(lambda p: block_loss(config, p, batch, LossOptions(plan, 2.0, remat=False))[0]))(params)
    for path, gradient in flatten(jax.jit(jax.grad(loss))(params)).items():
        np.testing.assert_allclose(flatten(found)[path], gradient, rtol=1e-3, atol=1e-5, err_msg=path)


@pytest.mark.once
def test_mage_loss_with_the_first_canvas_and_the_exact_pass() -> None:
    """The sparse pass sees what the wholly masked block chooses; the exact pass's cross-entropy is added, too."""
    config = tiny.SDAR
    tokens = jax.random.randint(jax.random.key(1), (2, 32), 0, tiny.MASK)
    maskable = jax.random.bernoulli(jax.random.key(3), 0.7, tokens.shape)
    at = jnp.array([[3, 5], [6, 7]])
    batch = corrupt(jax.random.key(2), tokens, config.diffusion, maskable=maskable, at=at)
    params = jax.tree.map(jnp.asarray, tiny.params(config))
    plan = dataclasses.replace(PLAN, budget=3)

    @jax.jit
    def parts(p: Any) -> tuple[jax.Array, jax.Array]:
        held = TrainAttend(batch.first, batch.at, batch.masked, plan=plan)
        first = jnp.take_along_axis(maskable.reshape(2, 8, 4), batch.at[:, :, None], axis=1)
        begun = dataclasses.replace(batch, masked=first)
        select = dataclasses.replace(held, mode="select", masked=first)
        _, chosen = noisy_hidden(config, jax.lax.stop_gradient(p), begun, select)
        exact, _ = noisy_hidden(config, p, batch, held)
        sparse, _ = noisy_hidden(config, p, batch, dataclasses.replace(held, mode="sparse"), chosen)
        top = head(config, p)
        return (
            token_loss(config, top, sparse, batch, jax.lax.stop_gradient(exact)).mean_divergence()
            + token_loss(config, top, sparse, batch).mean(),
            token_loss(config, top, exact, batch).mean(),
        )

    def expected(p: Any) -> jax.Array:
        sparse, exact = parts(p)
        return sparse + 0.5 * exact

    def found(p: Any, **more: Any) -> jax.Array:
        return block_loss(config, p, batch, LossOptions(plan, exact=0.5, remat=False, **more))[0]

    wanted, slope = jax.jit(jax.value_and_grad(expected))(params)
    loss, gradient = jax.jit(jax.value_and_grad(functools.partial(found, canvas="first")))(params)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for path, leaf in flatten(slope).items():
        np.testing.assert_allclose(flatten(gradient)[path], leaf, rtol=1e-3, atol=1e-5, err_msg=path)
    assert abs(float(jax.jit(found)(params)) - float(loss)) > 1e-4  # the noisy canvas chooses others


def test_plans_without_an_objective_are_refused() -> None:
    with pytest.raises(ConfigError, match="selector 'mage'"):
        LossOptions(Mage(selector="recent"))
    with pytest.raises(ConfigError, match="training for MAGE goes with rest 'drop'"):
        LossOptions(Mage(rest="keep"))
    with pytest.raises(ConfigError, match="weight of KL is -1"):
        LossOptions(kl=-1)
    with pytest.raises(ConfigError, match="weight of the exact pass is nan"):
        LossOptions(exact=float("nan"))


# --- LoRA and the optimiser ---------------------------------------------------------------------------------------


def test_adapters_begin_as_nothing_and_merge_as_they_were_trained() -> None:
    config, batch = tiny.FAST_DLLM, some_batch(tiny.FAST_DLLM)
    params = jax.tree.map(jnp.asarray, tiny.params(config))
    adapters = lora.init_adapters(config, 3, jax.random.key(0))
    assert len(adapters) == 4 * config.num_layers
    options = LossOptions(lora_alpha=6.0, remat=False)
    loss = jax.jit(lambda a: block_loss(config, params, batch, options, adapters=a)[0])
    np.testing.assert_allclose(loss(adapters), nll(config, params, batch)[0], rtol=1e-6)
    moved = jax.tree.map(lambda x: x + 0.05, adapters)
    merged = lora.merge(params, moved, alpha=6.0)
    np.testing.assert_allclose(loss(moved), nll(config, merged, batch)[0], rtol=1e-5)
    unchanged = [p for p in flatten(params) if p not in adapters]
    assert all((flatten(merged)[p] == flatten(params)[p]).all() for p in unchanged)
    # Frozen weights with joined layers are the same weights, and the arrays that they were made of are gone.
    copied = jax.tree.map(jnp.copy, params)
    joined = joined_layers.join(copied)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(copied["layers"]))
    joined_loss = jax.jit(lambda p, a: block_loss(config, p, batch, options, adapters=a)[0])
    np.testing.assert_allclose(joined_loss(joined, moved), loss(moved), rtol=1e-6)
    again = lora.merge(joined, moved, alpha=6.0)
    assert flatten(again).keys() == flatten(merged).keys()
    jax.tree.map(np.testing.assert_array_equal, again, merged)
    params["layers"]["0"]["more"] = jnp.zeros(1)
    assert joined_layers.join(params) is params  # layers that differ stay apart
    with pytest.raises(ConfigError, match="rank is 0"):
        lora.init_adapters(config, 0, jax.random.key(0))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizer_lowers_the_loss_and_skips_what_is_not_finite(kind: str) -> None:
    def loss(trained: Any, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return jnp.mean(jnp.square(trained["matrix"] @ batch + trained["bias"][:, None] - 1.0)), {}

    optimizer = training.Optimizer(kind, weight_decay=0.01)
    trained = {"matrix": jax.random.normal(jax.random.key(0), (6, 4)), "bias": jnp.zeros(6)}
    state = training.init_state(trained, optimizer)
    step = jax.jit(training.make_step(loss, optimizer))
    batch = jax.random.normal(jax.random.key(1), (4, 16))
    losses = []
    for _ in range(60):
        state, metrics = step(state, batch, 0.1)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.2 * losses[0]
    before = state.trained
    state, metrics = step(state, batch * jnp.nan, 0.1)
    assert np.isnan(float(metrics["loss"]))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, state.trained))


def test_muon_updates_are_orthogonal() -> None:
    x = jax.random.normal(jax.random.key(0), (24, 40))
    values = np.linalg.svd(np.asarray(training._orthogonal(x)), compute_uv=False)
    assert (values > 0.6).all()
    assert (values < 1.3).all()
    with pytest.raises(ConfigError, match="optimizer is 'sgd'"):
        training.Optimizer("sgd")
