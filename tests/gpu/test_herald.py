"""The HERALD plan on the card: the host's rows bit for bit, the dense plan's cache, a fetch that runs beside steps."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common import rms_error
from herald_jax import (
    Dense,
    GenerateConfig,
    Herald,
    Model,
    ModelConfig,
    StaticLowConfidence,
    device_index,
    draft_moment,
    generate,
    host_kv,
    offload,
    pool_fill,
    select,
)
from herald_jax.cache import DeviceKV
from herald_jax.generate import _Run
from herald_jax.herald import Pipeline
from herald_jax.host_kv import HostKV
from herald_jax.host_scores import host_views
from herald_jax.host_select import Scanner
from herald_jax.pooled import PooledKV
from pallas_kernels import index_scores
from pallas_kernels.layers import gather_layers, write_layers
from tests.herald_jax import tiny

pytestmark = pytest.mark.gpu
LENGTHS = (3, 130, 300, 640)
REQUEST = GenerateConfig(max_new_tokens=100, policy=StaticLowConfidence(4), ignore_stop=True)


def config_of(form: str = "sdar") -> ModelConfig:
    base = dataclasses.replace(tiny.FORMS[form], num_layers=3, hidden_size=128, head_dim=128, dtype="bfloat16")
    contract = dataclasses.replace(base.diffusion, block_length=32, small_block_length=8)
    return dataclasses.replace(base, diffusion=contract, max_position_embeddings=2048)


def started(plan: Herald, form: str = "sdar") -> _Run:
    config = config_of(form)
    model = Model.from_params(config, tiny.params(config))
    return _Run(model, tiny.prompts(LENGTHS), REQUEST, plan, None, None)


@pytest.mark.parametrize(("batch", "slots"), [(1, 1000), (3, 4104)])
def test_layers_are_gathered_from_and_written_to_host_memory_bit_for_bit(batch: int, slots: int) -> None:
    layers, heads, dim, chosen = 3, 2, 128, 77
    rng = np.random.default_rng(slots)
    shape = (1, batch, heads, slots, dim)
    values = [rng.standard_normal(shape).astype(jnp.bfloat16) for _ in range(2 * layers)]
    place = host_kv.host_sharding(None)
    k, v = ([jax.device_put(x, place) for x in half] for half in (values[:layers], values[layers:]))
    indices = np.sort(rng.integers(-1, slots, (layers, batch, heads, chosen)), axis=-1).astype(np.int32)
    pool = jnp.zeros((layers, batch, heads, 96, dim), jnp.bfloat16)
    got = np.asarray(jax.jit(gather_layers)(k, jnp.asarray(indices), pool))
    for layer, row, head in np.ndindex(layers, batch, heads):
        for slot, index in enumerate(indices[layer, row, head]):
            wanted = values[layer][0, row, head, index] if index >= 0 else 0
            np.testing.assert_array_equal(got[layer, row, head, slot], wanted)

    block = rng.standard_normal((2, layers, batch, heads, 32, dim)).astype(jnp.bfloat16)
    start = rng.integers(0, slots - 32, batch).astype(np.int32)
    mask = np.arange(batch) % 2 == 0
    k, v = write_layers(*map(jnp.asarray, block), jnp.asarray(start), k, v, mask=jnp.asarray(mask))
    for i, x in enumerate((*k, *v)):
        assert x.sharding.memory_kind == "pinned_host"
        expected = values[i].copy()
        for row in np.flatnonzero(mask):
            expected[0, row, :, start[row] : start[row] + 32] = block[i // layers, i % layers, row]
        [view] = host_views(x).values()
        np.testing.assert_array_equal(view, expected)


@pytest.mark.parametrize("how", ["native", "xla"])
@pytest.mark.parametrize(("queries", "dim", "slots"), [(4, 128, 9000), (7, 128, 4097), (1, 64, 130), (18, 256, 333)])
def test_the_host_scans_page_locked_keys(how: Literal["native", "xla"], queries: int, dim: int, slots: int) -> None:
    layers, batch, heads = 3, 3, 2
    rng = np.random.default_rng(slots)
    keys = [rng.standard_normal((1, batch, heads, slots, dim)).astype(jnp.bfloat16) for _ in range(layers)]
    q = rng.standard_normal((layers, batch, heads, queries, dim)).astype(jnp.bfloat16)
    lengths = np.array([slots, slots - 45, 1], np.int32)
    scanner = Scanner(how)
    try:
        k = [jax.device_put(x, host_kv.host_sharding(None)) for x in keys]
        [part] = scanner.submit(jnp.asarray(q), k, jnp.asarray(lengths)).parts
        scanned = part.result(timeout=120)
    finally:
        scanner.close()
    found = np.concatenate([np.asarray(x) for x in scanned.scores])
    for layer, row in np.ndindex(layers, batch):
        some = keys[layer][0, row, :, : lengths[row]].astype(np.float64)
        wanted = np.einsum("krd,knd->krn", q[layer, row].astype(np.float64), some) / dim**0.5
        np.testing.assert_allclose(found[layer, row, :, :, : lengths[row]], wanted, rtol=2**-11 * 1.02, atol=2e-5)


@pytest.mark.parametrize(("form", "selector"), [("sdar", "index"), ("fast_dllm", "cpu")])
def test_pools_hold_what_the_host_holds(form: str, selector: str) -> None:
    with started(Herald(0.2, min_budget=16, selector=selector), form) as run:
        for _ in range(3):
            run.advance(pause=True)
        cache, pipeline = run._rows.cache, run._pipeline
        assert isinstance(cache, PooledKV)
        assert pipeline is not None
        indices, counts, start = (np.asarray(x) for x in (pipeline._held.indices, cache.counts, cache.start))
        for layer in range(run.model.config.num_layers):
            for host, pool in ((pipeline._host.k, cache.pool.k), (pipeline._host.v, cache.pool.v)):
                [view] = host_views(host[layer]).values()
                held = np.asarray(pool[layer])
                for row, head in np.ndindex(indices.shape[1:3]):
                    chosen = indices[layer, row, head]
                    positions = np.concatenate([chosen[chosen >= 0], np.arange(start[row], start[row] + 32)])
                    np.testing.assert_array_equal(held[row, head, : counts[row]], view[0, row, head, positions])


def test_choosing_everything_leaves_the_dense_plans_cache() -> None:
    """Of the first block written: later ones may differ where roundings decide a near tie."""
    with started(Herald(1.0)) as run:
        run.advance(pause=True)
        run.advance(pause=True)
        assert run._pipeline is not None
        keys = run._pipeline._host.k
        with _Run(run.model, tiny.prompts(LENGTHS), REQUEST, Dense(), None, None) as dense:
            dense.advance(pause=True)
            dense.advance(pause=True)
            theirs = dense._rows.cache
            assert isinstance(theirs, DeviceKV)
            for layer, k in enumerate(keys):
                [view] = host_views(k).values()
                for row, length in enumerate(LENGTHS):
                    whole = length // 32 * 32
                    if whole:
                        assert rms_error(view[0, row, :, :whole], theirs.k[layer, row, :, :whole]) < 0.02


def test_the_fetch_runs_beside_the_steps_and_nothing_is_copied() -> None:
    with started(Herald(0.2, min_budget=16)) as run:
        pipeline, rows = run._pipeline, run._rows
        assert pipeline is not None
        batch, heads = len(LENGTHS), run.model.config.num_kv_heads
        page = select.scored_page(pipeline._plan)
        scores = tuple(jnp.zeros((batch, heads, -(-k.shape[3] // page)), jnp.float32) for k in pipeline._host.k)
        lowered = offload.finish.lower(
            run.model.params, rows, pipeline._spare, scores, rows.length, pipeline._held, pipeline._host,
            REQUEST.policy, run._sampling, run._stops, options=run._options,
        )  # fmt: skip
        text = lowered.compile().as_text()
        entry = text[text.index("\nENTRY") :].splitlines()
        where = {
            what: [i for i, line in enumerate(entry) if re.search(rf"= .*\b{what}\(", line)]
            for what in ("call-start", "call-done", "while")
        }
        assert len(where["call-start"]) == len(where["call-done"]) == 2
        [steps] = where["while"]
        assert max(where["call-start"]) < steps < min(where["call-done"])
        assert isinstance(rows.cache, PooledKV)
        host = HostKV(pipeline._host.k[:1], pipeline._host.v[:1])
        part = offload.fill.lower(
            rows.cache.pool, rows.cache.counts, pipeline._spare, scores[:1], rows.length, pipeline._held, host,
            jnp.int32(0), options=run._options,
        )  # fmt: skip
        pool = ",".join(map(str, pipeline._spare.k.shape))
        for program in (text, part.compile().as_text()):
            assert not re.search(rf"bf16\[{pool}\]\S* copy\(", program)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_measured_run_writes_the_same_and_knows_its_fetches(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    monkeypatch.setattr(draft_moment, "parts", lambda *_: parts)
    config = config_of()
    model = Model.from_params(config, tiny.params(config))
    plain, measured = (generate(model, tiny.prompts(LENGTHS), REQUEST, Herald(0.2, measure=x)) for x in (False, True))
    assert measured.tokens == plain.tokens
    stats = measured.stats.offload
    assert stats is not None
    # PCIe's rate at most, and no fetch as long as all of the run.
    assert stats.fetched_bytes / 64e9 < stats.fetch_seconds < measured.stats.decode_seconds
    assert 0 <= stats.fetch_exposed_seconds <= stats.fetch_seconds


def test_a_fetch_is_over_long_before_the_steps_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    settle = Pipeline.settle

    def look(self: Pipeline) -> Any:
        found.extend(np.asarray(moved.times, np.int64) for moved in self._moved)
        return settle(self)

    monkeypatch.setattr(Pipeline, "settle", look)
    config = config_of()
    request = dataclasses.replace(REQUEST, max_new_tokens=320, policy=StaticLowConfidence(32))
    generate(
        Model.from_params(config, tiny.params(config)), tiny.prompts(LENGTHS), request,
        Herald(0.2, selector="index", measure=True),
    )  # fmt: skip
    took = []
    for low, high in (np.moveaxis(times, -1, 0) for times in found):
        (begun, ended), (also, stepped) = low + (high << 32)
        assert begun == also
        assert begun < ended
        took.append((int(ended - begun), int(stepped - begun)))
    assert len(took) > 6
    # A few KB, beside 16 steps. The first blocks may not be graphs yet: then both are waited for in turn.
    assert all(2 * fetch < steps for fetch, steps in took[-3:]), took


def test_a_run_from_start_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    model = Model.from_params(config, tiny.params(config))
    kept = Herald(0.2, min_budget=16)
    plans = [dataclasses.replace(kept, keep_bonus=0.0), dataclasses.replace(kept, reuse=False), kept]
    first, second, third = (generate(model, tiny.prompts(LENGTHS), REQUEST, plan) for plan in plans)
    assert first.tokens == second.tokens
    assert all(len(tokens) == 100 for result in (first, third) for tokens in result.tokens)
    moved = [result.stats.offload for result in (third, first, second)]
    assert 0 < moved[0].fetched_bytes < moved[1].fetched_bytes < moved[2].fetched_bytes  # type: ignore[union-attr]
    monkeypatch.setattr(draft_moment, "parts", lambda *_: config.num_layers)
    assert generate(model, tiny.prompts(LENGTHS), REQUEST, kept).tokens == third.tokens


@pytest.mark.parametrize("page", [1, 16])
def test_what_the_pool_holds_is_kept_as_numpy_keeps_it(page: int) -> None:
    """Of random importances, bit for bit: shares and bonus are powers of two and their sums."""
    rng = np.random.default_rng(page)
    plan = Herald(0.1, min_budget=1, page_size=page, keep_bonus=0.5)
    prefix, resident, counts = np.array([4096, 1000]), np.array([4064, 2**31 - 1]), np.array([300 + 32, 90])
    pages = 4096 // page
    sums = rng.random((3, 2, 2, pages), np.float32)
    indices = np.full((3, 2, 2, 384), -1, np.int32)
    for at in np.ndindex(3, 2, 2):
        below, count = ((4064, 300), (1000, 90))[at[1]]
        indices[at][:count] = np.sort(rng.choice(below, count, replace=False))
    capacity = select.selected_capacity(plan, 4096)

    def choose(sums: jax.Array, indices: jax.Array, resident: jax.Array, counts: jax.Array, prefix: jax.Array) -> Any:
        favour = 1 + plan.bonus * pool_fill.held_shares(pool_fill.Held(indices, resident), counts, prefix, page, pages)
        return select.pick_scored(plan, sums, select.budget_of(plan, prefix), prefix, capacity, None, favour)

    numbers = (jnp.asarray(x, jnp.int32) for x in (resident, counts, prefix))
    got = np.asarray(jax.jit(choose)(jnp.asarray(sums), jnp.asarray(indices), *numbers))
    for at in np.ndindex(3, 2, 2):
        length = int(prefix[at[1]])
        held = np.isin(np.arange(length), indices[at]) | (np.arange(length) - resident[at[1]] >= 0)
        score = np.empty(length, np.float32)
        for begin in range(0, length, page):
            inside = slice(begin, min(begin + page, length))
            mean = sums[at][begin // page] / np.float32(inside.stop - begin)
            score[inside] = mean * np.float32(1 + 0.5 * held[inside].mean())
        best = np.sort(np.argsort(-score, kind="stable")[: plan.entries(length)])
        np.testing.assert_array_equal(got[at], np.pad(best, (0, capacity - len(best)), constant_values=-1))


@pytest.mark.parametrize("bits", [8, 4])
def test_the_index_is_scored_as_restored_keys_are(bits: int) -> None:
    rng = np.random.default_rng(bits)
    k = jnp.asarray(rng.standard_normal((2, 3, 1000, 128)), jnp.bfloat16)
    q = jnp.asarray(rng.standard_normal((1, 2, 3, 4, 128)), jnp.bfloat16)
    lengths = jnp.array([1000, 300], jnp.int32)
    keys = device_index.build(k[None], bits=bits, mesh=None)
    [scored] = device_index.score((keys,), q, lengths, reduce="mean", mesh=None)
    codes = index_scores.unpack(keys.codes) if bits == 4 else keys.codes
    restored = codes.reshape(*keys.scales.shape, -1) * keys.scales[..., None].astype(jnp.float32)
    restored = restored.reshape(k.shape)
    assert rms_error(restored, k) < (0.02 if bits == 8 else 0.15)
    scores = jnp.einsum("bkrd,bknd->bkrn", q[0].astype(jnp.float32), restored, precision="highest") / 128**0.5
    wanted = index_scores.softmax_over_prefix(scores, lengths.reshape(-1, 1, 1, 1), "mean")
    assert rms_error(scored, wanted) < 0.01
