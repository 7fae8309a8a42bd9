"""The HERALD plan: equal to Dense where it chooses everything, to MAGE without a draft, to a plain restatement."""

import dataclasses
import gc
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import herald_jax
from benchmarks.shapes import SHAPES
from herald_jax import (
    BlockEvent,
    Dense,
    GenerateConfig,
    GenerationError,
    Herald,
    Mage,
    Model,
    StaticLowConfidence,
    Stats,
    Threshold,
    draft_moment,
    host_kv,
    host_prefill,
    host_scan,
    host_scan_xla,
    host_scores,
    host_select,
    offload,
    plans,
    pool_fill,
)
from herald_jax.generate import _Run
from herald_jax.pooled import PooledKV
from tests.herald_jax import plain_herald, tiny

FORMS = {name: dataclasses.replace(tiny.FORMS[name], num_layers=3) for name in ("sdar", "fast_dllm")}
LENGTHS = (1, 18, 33, 8)  # a prefix of length 0, two ragged ones, one of whole blocks
REQUEST = GenerateConfig(max_new_tokens=13, policy=Threshold(0.6), ignore_stop=True)
SPARSE = Herald(0.3, min_budget=2)
PROGRAMS = (offload.denoise, offload.draft, offload.fill, offload.finish, offload.turn)


def generated(plan, form="sdar", request=REQUEST, lengths=LENGTHS):
    return herald_jax.generate(tiny.model(FORMS[form]), tiny.prompts(lengths), request, plan)


@pytest.mark.parametrize(
    ("form", "plan"),
    [
        ("sdar", Herald(1.0, dense_layers=1)),
        pytest.param("sdar", Herald(1.0, selector="split", split=0.4, index_bits=4), marks=pytest.mark.once),
        pytest.param("fast_dllm", Herald(1.0, selector="index", draft_at=0.2, keep_bonus=2.0), marks=pytest.mark.once),
    ],
    ids=lambda x: x if isinstance(x, str) else f"{x.selector}-{x.query}",
)
def test_choosing_everything_is_dense(form, plan):
    dense = generated(Dense(), form)
    sparse = generated(plan, form)
    assert sparse.tokens == dense.tokens
    assert sparse.stats.sparse_blocks == 0
    assert sparse.stats.forwards == dense.stats.forwards


def test_without_a_draft_it_selects_as_mage_does():
    """The cache in host memory, MAGE's choice: the same tokens."""
    ours = generated(dataclasses.replace(SPARSE, query="all", draft=False, dense_layers=1, reduce="max", page_size=2))
    plan = Mage(0.3, query="all", min_budget=2, dense_layers=1, reduce="max", normalise="prefix", page_size=2)
    mage = generated(plan)
    assert ours.tokens == mage.tokens
    assert ours.stats.sparse_blocks == mage.stats.sparse_blocks > 0
    assert ours.tokens != generated(Dense()).tokens


PLANS = [
    ("sdar", SPARSE),
    pytest.param(
        "sdar",
        Herald(6, min_budget=0, query="last", reduce="max", sinks=1, recent=2, draft_at=0.75, dense_layers=1),
        marks=pytest.mark.once,
    ),
    ("fast_dllm", Herald(0.25, min_budget=3, query="mean", draft_at=0.3, page_size=2)),
    ("sdar", Herald(0.3, min_budget=2, page_size=3, keep_bonus=1.0)),
    pytest.param(
        "fast_dllm", Herald(0.3, min_budget=2, page_size=1, selector="split", keep_bonus=0.5), marks=pytest.mark.once
    ),
    pytest.param("sdar", Herald(0.3, min_budget=3, page_size=2, sinks=1, keep_bonus=1.0), marks=pytest.mark.once),
]


@pytest.mark.parametrize(
    ("form", "plan"), PLANS, ids=lambda x: x if isinstance(x, str) else f"{x.query}-{x.page_size}-{x.keep_bonus}"
)
def test_equals_the_plain_restatement_row_by_row(form, plan):
    """Also: whatever the neighbours do, since the restatement has none."""
    model, prompts = tiny.model(FORMS[form]), tiny.prompts(LENGTHS)
    result = herald_jax.generate(model, prompts, REQUEST, plan)
    assert result.tokens == [plain_herald.decode(model, prompt, REQUEST, plan) for prompt in prompts]
    assert 0 < result.stats.sparse_blocks < result.stats.blocks
    assert result.tokens != herald_jax.generate(model, prompts, REQUEST, Dense()).tokens


@pytest.mark.once
def test_an_automatic_draft_is_as_early_as_the_scan_needs_it():
    """The restatement is given the share that this tiny model comes to: its steps hide nothing, so the first one's."""
    request = dataclasses.replace(REQUEST, policy=StaticLowConfidence(4))
    plan = dataclasses.replace(SPARSE, draft_at="auto")
    model, prompts = tiny.model(FORMS["sdar"]), tiny.prompts(LENGTHS)
    tokens = herald_jax.generate(model, prompts, request, plan).tokens
    early, late = (dataclasses.replace(plan, draft_at=share) for share in (0.25, 0.5))
    assert tokens == [plain_herald.decode(model, prompt, request, early) for prompt in prompts]
    assert tokens != herald_jax.generate(model, prompts, request, late).tokens
    assert generated(plan).tokens == generated(late).tokens  # a threshold: nobody knows how many steps there will be


def test_the_draft_is_made_as_late_as_what_follows_can_be_hidden():
    def moment(thousands, rows=1, steps=32, **plan):
        prefix = jnp.full((rows,), 1024 * thousands, jnp.int32)
        plan = Herald(0.05, draft_at="auto", **plan)
        found = draft_moment.revealed(prefix, StaticLowConfidence(steps), plan=plan, config=SHAPES["sdar8b"])
        return found.tolist()

    assert moment(16) == [16]  # half of the block
    # 64K: 4.8 GB of keys take 81 ms and 12, the fetch of 0.5 GB 11, steps of 16.9 GB 5.6 each: 19, and 3 for slack.
    assert moment(64) == [10]
    assert moment(128) == [1]
    assert moment(64, rows=8) == [1] * 8
    assert moment(64, rows=8, selector="index")[0] > 1
    assert moment(64, rows=2, steps=10, selector="index") == [11] * 2  # after 4, 4 and 3
    assert moment(64, selector="split", split=0.5)[0] > moment(64)[0]


def test_the_last_steps_are_as_many_as_hide_the_transfers():
    def left(pool, scores, **policy):
        policy = StaticLowConfidence(policy.get("steps", 32))
        return draft_moment.left_for_transfers(int(pool * 1e9), int(scores * 1e9), policy, SHAPES["sdar8b"])

    # 22 ms and 7, beside steps of 5.8: 4, of which the last commits, and 2 before them.
    assert left(1.0, 0.3) == (5, 3)
    assert left(0.1, 0.03) == (3, 2)  # 12 ms of launches beside steps of 5.5
    assert left(1.0, 0.3, steps=8) == (20, 12)  # four masks a step
    assert left(20, 20) == (32, 32)


def test_short_rows_do_not_wait_for_a_fetch_as_long_as_their_pool(monkeypatch):
    asked = []
    real = draft_moment.left_for_transfers

    def left(selected, *rest):
        asked.append(selected)
        return real(selected, *rest)

    monkeypatch.setattr(draft_moment, "left_for_transfers", left)
    generated(SPARSE)
    config = FORMS["sdar"]
    token, block = config.kv_bytes_per_token, config.diffusion.block_length
    assert len(asked) > 1
    for i, selected in enumerate(asked):
        assert selected == token * sum(SPARSE.entries(n // block * block + i * block) for n in LENGTHS)


def test_a_scan_that_takes_longer_than_the_steps_is_fetched_in_parts(monkeypatch):
    def parts(thousands, rows, steps=32, name="sdar8b"):
        config, prefix = SHAPES[name], np.full((rows,), 1024 * thousands)
        return draft_moment.parts(prefix, config.num_layers, StaticLowConfidence(steps), Herald(0.05), config)

    # 128K: 9.7 GB of keys take 161 ms, 32 steps of 17.4 GB 186: the fetch finds steps to hide behind.
    assert parts(128, 1) == 1
    assert parts(64, 8) == 12
    assert parts(64, 1) == 1
    assert parts(64, 1, steps=8) == 12
    # 256K: 322 ms, 32 steps of 18.3 GB 196, the fetch of 1.9 GB 43.
    assert parts(256, 1) == 12

    plan = dataclasses.replace(SPARSE, page_size=2, keep_bonus=1.0)
    result = generated(plan)
    monkeypatch.setattr(draft_moment, "parts", lambda *_: 3)
    in_parts = generated(plan)
    assert in_parts.tokens == result.tokens
    moved, as_a_whole = in_parts.stats.offload, result.stats.offload
    for name in ("fetched_bytes", "reused_bytes", "scan_bytes", "blocks"):
        assert getattr(moved, name) == getattr(as_a_whole, name)


def test_streams_the_same_blocks_and_reports_what_it_moved():
    streamed, stats = [[] for _ in LENGTHS], None
    for event in herald_jax.stream(tiny.model(FORMS["sdar"]), tiny.prompts(LENGTHS), REQUEST, SPARSE):
        if isinstance(event, BlockEvent):
            streamed[event.row] += event.tokens
        else:
            stats = event
    result = generated(SPARSE)
    assert streamed == result.tokens
    assert isinstance(stats, Stats)
    moved, without = stats.offload, generated(dataclasses.replace(SPARSE, reuse=False)).stats.offload
    assert moved.fetched_bytes == result.stats.offload.fetched_bytes
    assert without.reused_bytes == 0
    assert moved.fetched_bytes + moved.reused_bytes == without.fetched_bytes
    assert 0 < moved.reused_bytes < without.fetched_bytes
    assert moved.blocks > 0
    assert moved.scan_bytes > 0
    assert any("over PCIe" in line for line in stats.lines())


@pytest.mark.parametrize("parts", [1, 3])
def test_measures_how_long_fetching_took_and_changes_no_token(monkeypatch, parts):
    monkeypatch.setattr(draft_moment, "parts", lambda *_: parts)
    plain, measured = generated(SPARSE), generated(dataclasses.replace(SPARSE, measure=True))
    assert measured.tokens == plain.tokens
    counted, stats = plain.stats.offload, measured.stats.offload
    assert counted.fetch_seconds == 0
    assert counted.fetch_hidden is None
    assert not any("fetching" in line for line in plain.stats.lines())
    assert stats.fetched_bytes == counted.fetched_bytes
    assert 0 < stats.fetch_seconds < measured.stats.decode_seconds + measured.stats.compile_seconds
    assert 0 <= stats.fetch_exposed_seconds <= stats.fetch_seconds
    if parts > 1:  # without steps beside them
        assert stats.fetch_exposed_seconds == stats.fetch_seconds
    assert any("fetching" in line and "hidden" in line for line in measured.stats.lines())


def test_what_the_pool_holds_is_kept_if_it_is_nearly_as_good(monkeypatch):
    plain = dataclasses.replace(SPARSE, page_size=2)
    fetched = [
        generated(dataclasses.replace(plain, keep_bonus=bonus)).stats.offload.fetched_bytes for bonus in (0, 0.5, 1e9)
    ]
    assert fetched[0] > fetched[1] > fetched[2]
    # A row's first block is chosen by its own prompt alone, whatever the bonus.
    size = FORMS["sdar"].diffusion.block_length
    for length in LENGTHS:
        request = dataclasses.replace(REQUEST, max_new_tokens=size - length % size)
        first = [
            generated(dataclasses.replace(plain, keep_bonus=bonus), request=request, lengths=(length,)).tokens
            for bonus in (0, 9)
        ]
        assert first[0] == first[1]
    # Without a bonus nothing of it is traced.
    monkeypatch.setattr(pool_fill, "held_shares", None)
    assert generated(dataclasses.replace(plain, min_budget=3, keep_bonus=0)).stats.offload.fetched_bytes > 0


def test_shares_held_are_of_selected_and_resident_entries():
    """Against loops: pages that the prefix ends in, no resident block, nothing held."""
    rng = np.random.default_rng(8)
    never, rows, heads, size, pages = 2**31 - 1, 4, 2, 3, 8
    prefix, resident = np.array([22, 9, 20, 0]), np.array([18, never, 16, never])
    indices, wanted = np.full((2, rows, heads, 7), -1), np.zeros((2, rows, heads, pages))
    counts = np.array([9, 5, 4, 0])
    for layer, row, head in np.ndindex(2, rows, heads):
        block = range(18, 22) if row == 0 else range(16, 20) if row == 2 else range(0)
        below = min(int(resident[row]), int(prefix[row]))
        entries = sorted(rng.choice(below, counts[row] - len(block), replace=False)) if below else []
        indices[layer, row, head, : len(entries)] = entries
        for page in range(-(-int(prefix[row]) // size)):
            whole = range(page * size, min((page + 1) * size, int(prefix[row])))
            wanted[layer, row, head, page] = np.mean([i in block or i in entries for i in whole])
    held = pool_fill.Held(*(jnp.asarray(x, jnp.int32) for x in (indices, resident)))
    arguments = [jnp.asarray(x, jnp.int32) for x in (counts, prefix)]
    got = jax.jit(pool_fill.held_shares, static_argnums=(3, 4))(held, *arguments, size, pages)
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-6)


def test_a_block_begun_in_vain_changes_nothing():
    """That all rows have met a stop is seen when the next block has been begun."""
    long = dataclasses.replace(REQUEST, max_new_tokens=40)
    stops = tuple({row[9] for row in generated(Dense(), request=long).tokens})
    request = dataclasses.replace(long, ignore_stop=False, stop_token_ids=stops)
    dense, sparse = (generated(plan, request=request) for plan in (Dense(), Herald(1.0)))
    assert max(map(len, dense.tokens)) <= 10
    assert sparse.tokens == dense.tokens
    assert sparse.stats.forwards == dense.stats.forwards
    assert sparse.stats.blocks == dense.stats.blocks


def test_the_pool_holds_the_rows_of_the_host_cache_bit_for_bit():
    with _Run(tiny.model(FORMS["sdar"]), tiny.prompts(LENGTHS), REQUEST, SPARSE, None, None) as run:
        pipeline, rows = run._pipeline, run._rows
        for _ in range(2):
            begun = pipeline.begin(rows, REQUEST.policy, run._sampling, run._stops, last=False)
            rows = pipeline.rest(begun, last=False)
        cache = rows.cache
        assert isinstance(cache, PooledKV)
        indices, counts = np.asarray(pipeline._held.indices), np.asarray(cache.counts)
        start = np.asarray(cache.start)
        for layer, (host_k, host_v) in enumerate(zip(pipeline._host.k, pipeline._host.v, strict=True)):
            for host, pool in ((host_k, cache.pool.k), (host_v, cache.pool.v)):
                host, pool = np.asarray(host)[0], np.asarray(pool)[layer]
                for row, head in np.ndindex(indices.shape[1:3]):
                    held = indices[layer, row, head]
                    held = held[held >= 0]
                    resident = np.arange(start[row], start[row] + FORMS["sdar"].diffusion.block_length)
                    positions = np.concatenate([held, resident])
                    assert len(positions) == counts[row]
                    np.testing.assert_array_equal(pool[row, head, : counts[row]], host[row, head, positions])


def test_quantised_keys_select_nearly_the_same():
    key = jax.random.key(3)
    k = jax.random.normal(key, (1, 2, 2, 256, 32), jnp.bfloat16)
    q = jax.random.normal(jax.random.key(4), (1, 2, 2, 3, 32), jnp.bfloat16) * 2
    lengths = jnp.array([256, 100], jnp.int32)
    scores = jnp.einsum("bknd,bkrd->bkrn", k[0], q[0], preferred_element_type=jnp.float32) / 32**0.5
    (exact,) = host_scores.weigh((scores[None],), lengths, reduce="mean")
    exact = np.asarray(exact)
    for bits, wanted in ((8, 0.93), (4, 0.75)):
        keys = herald_jax.device_index.build(k, bits=bits, mesh=None)
        assert keys.nbytes < k.nbytes * (bits / 16 + 0.1)
        (scored,) = herald_jax.device_index.score((keys,), q, lengths, reduce="mean", mesh=None)
        scored = np.asarray(scored)
        np.testing.assert_allclose(scored.sum(axis=-1), 1.0, atol=1e-3)
        assert not scored[1, :, 100:].any()
        for b, head in np.ndindex(2, 2):
            best, ours = (set(np.argsort(-x[b, head])[:32].tolist()) for x in (exact, scored))
            assert len(best & ours) / 32 >= wanted


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.02)])
def test_the_scan_scores_every_key_of_rows_of_any_length(dtype, tolerance):
    k = jax.random.normal(jax.random.key(0), (1, 3, 2, 1024, 16), dtype)
    q = jax.random.normal(jax.random.key(1), (1, 3, 2, 4, 16), dtype)
    lengths = jnp.array([1024, 130, 0], jnp.int32)
    scanner = host_select.Scanner()
    try:
        scanned = scanner.submit(q, [k], lengths).parts[0].result()
    finally:
        scanner.close()
    assert scanned.nbytes == (1024 + 130) * 2 * 16 * k.dtype.itemsize
    (importance,) = host_scores.weigh(scanned.scores, lengths, reduce="max")
    importance = np.asarray(importance)
    assert not importance[2].any()
    for row, length in ((0, 1024), (1, 130)):
        q64, k64 = (np.asarray(x[0, row], np.float64) for x in (q, k[:, :, :, :length]))
        scores = np.einsum("krd,knd->krn", q64, k64) / 4
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = (weights / weights.sum(-1, keepdims=True)).max(axis=1)
        np.testing.assert_allclose(importance[row, :, :length], wanted, rtol=tolerance, atol=1e-7)
        assert not importance[row, :, length:].any()


def test_an_error_in_the_scan_reaches_the_caller_and_ends_the_threads(monkeypatch):
    class Broken:
        def lower(self, *args, **kwargs):
            return host_scan.scan.lower(*args, **kwargs)

        def __call__(self, *args, **kwargs):
            raise FloatingPointError("the scan broke")

    monkeypatch.setattr(host_scan_xla, "scan", Broken())
    with pytest.raises(FloatingPointError, match="the scan broke"):
        generated(SPARSE)
    assert not scan_threads()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_run_says_who_scanned():
    form = dataclasses.replace(FORMS["sdar"], head_dim=32, dtype="bfloat16")
    model = Model.from_params(form, tiny.params(form))
    runs = {
        scan: herald_jax.generate(model, tiny.prompts(LENGTHS), REQUEST, dataclasses.replace(SPARSE, scan=scan)).stats
        for scan in ("auto", "native", "xla")
    }
    assert {scan: stats.offload.scanned_by for scan, stats in runs.items()} == {
        "auto": "native code", "native": "native code", "xla": "XLA",
    }  # fmt: skip
    assert len({stats.offload.scan_bytes for stats in runs.values()}) == 1
    assert any(line.startswith("selection           cpu (native code): ") for line in runs["auto"].lines())


def test_a_scan_that_cannot_be_native_is_refused_before_prefill(monkeypatch):
    def prefill(*args, **kwargs):
        raise AssertionError("prefilled")

    monkeypatch.setattr(host_prefill, "prefill", prefill)
    with pytest.raises(GenerationError, match='^scan is "native", but keys are float32, not bfloat16; choose "auto"'):
        generated(dataclasses.replace(SPARSE, scan="native"))
    assert not scan_threads()


def test_closing_a_stream_ends_the_threads():
    events = herald_jax.stream(tiny.model(FORMS["sdar"]), tiny.prompts(LENGTHS), REQUEST, SPARSE)
    for _ in range(len(LENGTHS) + 1):
        next(events)
    assert scan_threads()
    events.close()
    assert not scan_threads()


def scan_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("herald-scan")]


@pytest.mark.parametrize("other", [18, 1])  # beside 1 the selection leaves every NaN entry out
def test_a_nan_ends_its_row_alone(other):
    config = FORMS["sdar"]
    params = jax.tree.map(lambda x: x, tiny.params(config))
    clean = generated(SPARSE, lengths=(other, 33))
    table = np.array(params["embed"]["embedding"])
    poison = next(t for t in range(90) if t not in tiny.prompts((other,))[0] and t not in clean.tokens[0])
    table[poison] = np.nan
    params["embed"]["embedding"] = jnp.asarray(table)
    prompts = tiny.prompts((other, 33))
    prompts[1][5] = poison
    result = herald_jax.generate(Model.from_params(config, params), prompts, REQUEST, SPARSE)
    assert result.tokens[0] == clean.tokens[0]
    assert set(result.errors) == {1}
    assert "NaN" in result.errors[1]


def test_too_little_host_memory_is_a_sentence_with_both_figures(monkeypatch):
    monkeypatch.setattr(host_kv, "available", lambda: 10_000)
    with pytest.raises(GenerationError, match=r"needs 0.0 GB of host memory, but 0.0 GB are available"):
        generated(SPARSE)
    monkeypatch.setattr(host_kv, "available", lambda: 10**12)
    monkeypatch.delenv(host_kv.LIMIT_VARIABLE, raising=False)
    with pytest.raises(GenerationError, match=f"at most 64 GB; set {host_kv.LIMIT_VARIABLE}=88 before"):
        host_kv.check_room(80 * 10**9, gpu=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.0}, "budget is 0.0"),
        ({"query": "middle"}, "query is 'middle'"),
        ({"selector": "gpu"}, "selector is 'gpu'"),
        ({"index_bits": 2}, "index_bits is 2"),
        ({"draft_at": 1.5}, "draft_at is 1.5"),
        ({"keep_bonus": -0.5}, "keep_bonus is -0.5, but must be a finite number of at least 0"),
        ({"keep_bonus": float("inf")}, "keep_bonus is inf, but must be"),
        ({"keep_bonus": True}, "keep_bonus is True, but must be"),
        ({"keep_bonus": 0.5, "draft": False}, "keep_bonus is 0.5, but with draft False no entry is kept"),
        ({"keep_bonus": 0.5, "reuse": False}, "keep_bonus is 0.5, but with reuse False no entry is kept"),
        ({"measure": True, "draft": False}, "measure is of fetches beside a block's steps: it goes with draft True"),
        ({"measure": "yes"}, "measure is 'yes'"),
        ({"draft_at": "late"}, "draft_at is 'late', but must be a fraction in .* or \"auto\""),
        ({"budget": 4, "min_budget": 0, "sinks": 3, "recent": 2}, "sinks and recent are 5"),
    ],
)
def test_impossible_plans_are_refused(options, message):
    with pytest.raises(GenerationError, match=message):
        Herald(**options)


def test_a_bonus_is_for_plans_that_keep_entries(monkeypatch):
    monkeypatch.setattr(plans, "KEEP_BONUS", 0.5)
    assert Herald().bonus == 0.5
    assert Herald(draft=False).bonus == Herald(reuse=False).bonus == Herald(keep_bonus=0).bonus == 0


def test_requests_it_cannot_serve_are_refused():
    with pytest.raises(GenerationError, match="dense_layers is 3, but the model has 3 layers"):
        generated(Herald(dense_layers=3))
    request = dataclasses.replace(REQUEST, block_cache=True)
    with pytest.raises(GenerationError, match="not with Herald"):
        generated(SPARSE, "fast_dllm", request)
    causal = tiny.FORMS["llama"]
    with pytest.raises(GenerationError, match="no mask token"):
        herald_jax.generate(tiny.model(causal), tiny.prompts((5,)), REQUEST, SPARSE)


def test_a_thousand_blocks_compile_nothing_and_leave_nothing_behind():
    config = dataclasses.replace(FORMS["sdar"], num_layers=2, max_position_embeddings=8192)
    config = dataclasses.replace(config, diffusion=dataclasses.replace(config.diffusion, stop_token_ids=()))
    request = GenerateConfig(max_new_tokens=4100, policy=Threshold(0.0), ignore_stop=True)
    plan = Herald(8, min_budget=0, selector="split")
    with _Run(tiny.model(config), tiny.prompts((6,)), request, plan, None, None) as run:
        seen = []
        for block in range(1000):
            run.advance(pause=True)
            if block in (20, 998):
                gc.collect()
                programs = sum(f._cache_size() for f in PROGRAMS)
                seen.append((len(jax.live_arrays()), threading.active_count(), programs))
        # The counters of what was moved wait on the device for `settle`: one small array per block.
        assert seen[1][1:] == seen[0][1:]
        run._pipeline.settle()
        gc.collect()
        assert len(jax.live_arrays()) <= seen[0][0]
