"""The scan of keys by the CPU alone."""

from __future__ import annotations

import platform
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from herald_jax import host_kv, host_scan, host_scan_native, host_scan_xla, host_select, make_mesh
from herald_jax.errors import GenerationError

pytestmark = pytest.mark.usefixtures("optimised")
COMPILED = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def keys_and_queries(slots, queries, dim, heads=1):
    k = jax.random.normal(jax.random.key(slots), (heads, slots, dim), jnp.bfloat16)
    q = jax.random.normal(jax.random.key(queries), (heads, queries, dim), jnp.bfloat16)
    return np.array(k), np.array(q)


def scores_of(q, k, head=0, heads=1, reach=None):
    """`scan` with the queries of the second of two layers."""
    q = np.stack([np.zeros_like(q), q])
    reach = k.shape[1] if reach is None else reach
    return np.asarray(host_scan.scan(q, k, np.int32(1), np.int32(head), heads=heads, reach=reach))


# Some of the heads and keys: pieces of an even number of keys and of an odd one, streams that overlap by a key and by
# none, keys too few for streams, more queries than are scored together.
@pytest.mark.parametrize(
    ("slots", "queries", "dim", "where"),
    [
        (2500, 4, 128, {"head": 1, "heads": 2, "reach": 8 * 272}),
        (2000, 7, 64, {"heads": 3, "reach": 2000}),
        (48, 2, 128, {"head": 2, "reach": 3}),
        (301, 9, 16, {"heads": 1, "reach": 301}),
    ],
)
def test_scores_are_the_products_of_the_keys(slots, queries, dim, where):
    k, q = keys_and_queries(slots, queries, dim, heads=3)
    head, heads, reach = where.get("head", 0), where.get("heads", 1), where["reach"]
    some, asked = (x.astype(np.float64) for x in (k[head : head + heads, :reach], q[head : head + heads]))
    wanted = asked @ some.transpose(0, 2, 1) / dim**0.5
    for keys, dtype in ((k.view(np.uint32), np.float16), (k.astype(np.float32), np.float32)):
        scores = scores_of(q, keys, **where)
        assert scores.dtype == dtype
        rounding = 2**-11 * 1.01 if dtype == np.float16 else 1e-5
        np.testing.assert_allclose(scores, wanted, rtol=rounding, atol=1e-5)


def test_a_nan_is_kept_and_what_float16_cannot_hold_stays_finite():
    k, q = keys_and_queries(1024, 4, 16)
    q[:] = 1
    k[0, 5, 3], k[0, 700, 2], k[0, 900, 15] = np.nan, 1e30, -np.inf
    (scores,) = scores_of(q, k.view(np.uint32))
    assert np.isnan(scores[:, 5]).all()
    assert (scores[:, 700] == 65504).all()
    assert (scores[:, 900] == -65504).all()
    assert np.isfinite(np.delete(scores, 5, axis=1)).all()


@pytest.fixture
def uncompiled():
    host_scan_native.library.cache_clear()
    yield
    host_scan_native.library.cache_clear()


def native_scores(q, k, lengths):
    """The native scan's f16`[B, K, R, N]` of q `[B, K, R, D]` and k `[B, K, N, D]`; 77 where it wrote nothing."""
    scanning = host_scan_native.NativeScan()
    try:
        scores = np.full((*q.shape[:3], k.shape[2]), 77, np.float16)
        keys = jnp.asarray(k)[None]  # kept: only its memory is looked at
        places = scanning.places([keys])
        [device] = places[0]
        layers = [*scanning.scan(places, {device: q[None]}, {device: np.array(lengths)}, [{device: scores}])]
        assert layers == [0]
    finally:
        scanning.close()
    return scores


# Every way in which queries are taken together; keys that fill no vector; heads of one chunk and of several.
@COMPILED
@pytest.mark.parametrize(
    ("queries", "dim", "slots"),
    [(1, 64, 50), (2, 128, 70), (3, 32, 33), (4, 128, 9000), (5, 96, 41), (7, 128, 8193), (8, 256, 16), (20, 512, 35)],
)
def test_native_scores_are_the_products_of_the_keys(monkeypatch, uncompiled, queries, dim, slots):
    k = np.array(jax.random.normal(jax.random.key(slots), (4, 2, slots, dim), jnp.bfloat16))
    q = np.array(jax.random.normal(jax.random.key(queries), (4, 2, queries, dim), jnp.bfloat16))
    lengths = [slots, slots - 1, 3, 0]
    wanted = np.einsum("bkrd,bknd->bkrn", q.astype(np.float64), k.astype(np.float64)) / dim**0.5
    for compiler in ("cc", "cc -mno-avx512f") if platform.machine() == "x86_64" else ("cc",):
        monkeypatch.setenv("CC", compiler)
        host_scan_native.library.cache_clear()
        scores = native_scores(q, k, lengths)
        for row, length in enumerate(lengths):
            ours, exact = scores[row, :, :, :length], wanted[row, :, :, :length]
            np.testing.assert_allclose(ours, exact, rtol=2**-11 * 1.01, atol=1e-5)
            assert (scores[row, :, :, length:] == 77).all()


@COMPILED
def test_the_native_scan_keeps_a_nan_and_what_float16_cannot_hold_stays_finite():
    k, q = np.ones((1, 1, 1024, 32), jnp.bfloat16), np.ones((1, 1, 4, 32), jnp.bfloat16)
    k[0, 0, 5, 3], k[0, 0, 700, 2], k[0, 0, 900, 15] = np.nan, 1e30, -np.inf
    (scores,) = native_scores(q, k, [1024])[0]
    assert np.isnan(scores[:, 5]).all()
    assert (scores[:, 700] == 65504).all()
    assert (scores[:, 900] == -65504).all()
    np.testing.assert_array_equal(np.delete(scores, [5, 700, 900], axis=1), np.float16(32**0.5))


@COMPILED
def test_whoever_stops_listening_ends_the_native_scan():
    scanning = host_scan_native.NativeScan()
    k = jnp.ones((1, 1, 1, 1024, 32), jnp.bfloat16)
    places = scanning.places([k] * 50)
    [device] = places[0]
    scores = [{device: np.zeros((1, 1, 1, 1024), np.float16)} for _ in places]
    q = {device: np.ones((50, 1, 1, 1, 32), jnp.bfloat16)}
    layers = scanning.scan(places, q, {device: np.array([1024])}, scores)
    next(layers)
    layers.close()
    assert sorted(scanning.scan(places, q, {device: np.array([1024])}, scores)) == list(range(50))
    scanning.close()


@pytest.mark.parametrize(
    ("compiler", "sentence"),
    [
        ("no-such-compiler", "there is no C compiler 'no-such-compiler' (CC can name another)"),
        ("false", "false did not compile host_scan.c: status 1"),
        pytest.param("cc -include no-such.h", "cc -include no-such.h did not compile host_scan.c: ", marks=COMPILED),
        ("true", "host_scan.c could not be compiled and loaded: "),
        ('"cc', "host_scan.c could not be compiled and loaded: No closing quotation"),
    ],
)
def test_without_a_compiler_xla_scans_and_says_why(monkeypatch, uncompiled, compiler, sentence):
    monkeypatch.setenv("CC", compiler)
    k, q = jnp.ones((1, 1, 1, 64, 32), jnp.bfloat16), jnp.ones((1, 1, 1, 1, 32), jnp.bfloat16)
    for how in ("auto", "native"):
        scanner = host_select.Scanner(how)
        try:
            [part] = scanner.submit(q, [k], jnp.array([64], jnp.int32)).parts
            if how == "auto":
                part.result(timeout=60)
                assert scanner.by.startswith("XLA: ")
                assert sentence in scanner.by
            else:
                with pytest.raises(GenerationError, match='^scan is "native", but .*; choose "auto" or "xla"') as error:
                    part.result(timeout=60)
                assert sentence in str(error.value)
        finally:
            scanner.close()


@pytest.mark.parametrize(
    ("dtype", "dim", "sentence"),
    [
        (jnp.float32, 32, "XLA: keys are float32, not bfloat16"),
        (jnp.bfloat16, 48, "XLA: head dim 48 is not a multiple of 32 up to 512"),
        pytest.param(jnp.bfloat16, 32, "native code", marks=COMPILED),
    ],
)
def test_who_scans_goes_by_the_keys(dtype, dim, sentence):
    scanner = host_select.Scanner()
    try:
        q = jnp.ones((1, 1, 1, 1, dim), dtype)
        scanner.submit(q, [jnp.ones((1, 1, 1, 64, dim), dtype)], jnp.array([64], jnp.int32)).parts[0].result(timeout=60)
        assert scanner.by == sentence
    finally:
        scanner.close()


def test_streams_cover_every_key_of_every_piece():
    for heads, reach, queries in np.ndindex(17, 300, 9):
        pieces, streams, width = host_scan._layout(heads + 1, reach + 1, queries + 1)
        keys = (reach + 1) // pieces
        assert keys * pieces == reach + 1
        starts = host_scan._starts(keys, streams, width)
        covered = {key for start in starts for key in range(start, start + width)}
        assert covered == set(range(keys))
    assert host_scan._layout(8, 131072, 4) == (2, 4, 16385)


def test_keys_in_the_same_place_are_the_same_arrays_again():
    k = [jax.random.normal(jax.random.key(i), (1, 2, 2, 64, 16), jnp.bfloat16) for i in range(2)]
    scanning = host_scan_xla.XlaScan()
    try:
        (first,), (again,), (other,) = ([*scanning.places((x,))[0].values()] for x in (k[0], k[0], k[1]))
    finally:
        scanning.close()
    assert first is again
    assert other is not first
    assert first.dtype == np.uint32
    assert first.shape == (4, 64, 8)
    assert first.unsafe_buffer_pointer() == k[0].unsafe_buffer_pointer()


@pytest.fixture(params=[pytest.param("native", marks=COMPILED), "xla"])
def scanner(request):
    scanner = host_select.Scanner(request.param)
    yield scanner
    scanner.close()


def test_parts_are_handed_out_one_after_the_other(scanner):
    k = [jax.random.normal(jax.random.key(i), (1, 2, 2, 64, 32), jnp.bfloat16) for i in range(4)]
    q, lengths = jax.random.normal(jax.random.key(9), (4, 2, 2, 3, 32), jnp.bfloat16), jnp.array([64, 20], jnp.int32)
    [whole] = scanner.submit(q, k, lengths).parts
    scan = scanner.submit(q, k, lengths, parts=2)
    parts = [part.result(timeout=60) for part in scan.parts]
    assert scan.nearly.done()
    assert whole.result().nbytes == sum(part.nbytes for part in parts) == 4 * 84 * 2 * 32 * 2
    scores = [x for part in parts for some in part.scores for x in some]
    together = [x for some in whole.result().scores for x in some]
    for layer, (alone, one) in enumerate(zip(scores, together, strict=True)):
        wanted = np.einsum("bkrd,bknd->bkrn", *(np.asarray(x, np.float32) for x in (q[layer], k[layer][0]))) / 32**0.5
        for row, length in enumerate([64, 20]):  # what lies behind a row's end is nobody's
            ours = np.asarray(alone)[row, :, :, :length]
            np.testing.assert_array_equal(ours, np.asarray(one)[row, :, :, :length])
            np.testing.assert_allclose(ours, wanted[row, :, :, :length], rtol=1e-3, atol=1e-3)


def test_each_device_of_a_mesh_has_its_own_keys_scanned(scanner):
    mesh, axes = make_mesh(data=2, model=2), (None, "data", "model")
    rng = np.random.default_rng(0)
    k = [rng.standard_normal((1, 4, 2, 96, 32)).astype(jnp.bfloat16) for _ in range(3)]
    q = rng.standard_normal((3, 4, 2, 5, 32)).astype(jnp.bfloat16)
    lengths = np.array([96, 1, 0, 70], np.int32)
    keys = [jax.device_put(x, host_kv.host_sharding(mesh)) for x in k]
    assert len({str(shard.index) for shard in keys[0].addressable_shards}) == 4
    asked, rows = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((q, P(*axes)), (lengths, P("data"))))
    [part] = scanner.submit(asked, keys, rows).parts
    scores = np.concatenate([np.asarray(x, np.float32) for x in part.result(timeout=60).scores])
    assert part.result().nbytes == 3 * 2 * int(lengths.sum()) * 2 * 32  # layers, heads, keys, bytes
    for layer, row in np.ndindex(3, 4):
        some = k[layer][0, row, :, : lengths[row]].astype(np.float32)
        wanted = np.einsum("krd,knd->krn", q[layer, row].astype(np.float32), some) / 32**0.5
        np.testing.assert_allclose(scores[layer, row, :, :, : lengths[row]], wanted, rtol=1e-3, atol=1e-3)


# With one for each of 36 layers XLA waits, and every launch with it (docs/herald.md).
@pytest.mark.parametrize(("layers", "parts", "together"), [(36, 1, [6] * 6), (7, 1, [2, 2, 2, 1]), (36, 12, [3] * 12)])
def test_the_scores_of_several_layers_share_a_transfer(scanner, layers, parts, together):
    k = [jax.random.normal(jax.random.key(i), (1, 1, 1, 32, 32), jnp.bfloat16) for i in range(layers)]
    q = jax.random.normal(jax.random.key(99), (layers, 1, 1, 2, 32), jnp.bfloat16)
    scan = scanner.submit(q, k, jnp.array([32], jnp.int32), parts=parts)
    scores = [some for part in scan.parts for some in part.result(timeout=60).scores]
    assert [len(some) for some in scores] == together
    found = np.concatenate([np.asarray(some, np.float32) for some in scores])[:, 0, 0]
    wanted = np.einsum("lrd,lnd->lrn", np.asarray(q[:, 0, 0], np.float32), np.stack([x[0, 0, 0] for x in k])) / 32**0.5
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)


def test_rows_without_any_entry_get_their_parts_too(scanner):
    k = [jnp.zeros((1, 2, 1, 32, 32), jnp.bfloat16)] * 4
    scan = scanner.submit(jnp.zeros((4, 2, 1, 1, 32), jnp.bfloat16), k, jnp.zeros((2,), jnp.int32), parts=2)
    for part in scan.parts:
        scanned = part.result(timeout=60)
        assert scanned.nbytes == 0
        assert [len(some) for some in scanned.scores] == [1, 1]
    scan.nearly.result(timeout=60)


def test_an_error_ends_every_part(scanner, monkeypatch):
    def broken(*args):
        raise FloatingPointError("the scan broke")

    monkeypatch.setattr(host_scan_native, "_tasks", broken)
    monkeypatch.setattr(host_scan_xla, "_parts", broken)
    k = [jnp.zeros((1, 1, 1, 64, 32), jnp.bfloat16)] * 2
    scan = scanner.submit(jnp.zeros((2, 1, 1, 1, 32), jnp.bfloat16), k, jnp.array([64], jnp.int32), parts=2)
    scan.nearly.result(timeout=60)
    for part in scan.parts:
        with pytest.raises(FloatingPointError, match="the scan broke"):
            part.result(timeout=60)


@pytest.mark.parametrize("scanner", ["xla"], indirect=True)
def test_the_next_program_is_there_before_a_row_needs_it(scanner):
    k = [jax.random.normal(jax.random.key(1), (1, 1, 1, 2048, 16), jnp.bfloat16)]
    q = jax.random.normal(jax.random.key(9), (1, 1, 1, 1, 16), jnp.bfloat16)

    def programs(length):
        scanner.submit(q, k, jnp.array([length], jnp.int32)).parts[0].result(timeout=60)
        return sorted(key[-1] for key in scanner._xla._programs)

    assert programs(10) == [256, 512]
    [program.result(timeout=60) for program in scanner._xla._programs.values()]
    called = host_scan.scan._cache_size()
    assert programs(2048) == [256, 512, 2048]
    assert programs(300) == [256, 512, 768, 2048]
    assert host_scan.scan._cache_size() == called + 2
