"""`block_attention` beside its floors and its peers: long prefixes, short pools, importance, prefill.

    python -m benchmarks.kernels_attention         # or as a part of benchmarks.kernels

The floor of a case is the bytes of K and V over the bandwidth of a large device copy measured in the same run; for
short pools at least 6 us, about what two launches take. Peers: PyTorch's SDPA (flash and cudnn) in a process of its own
on every case, jax.nn.dot_product_attention (cudnn and xla) on some, all with the query heads of a group folded into the
query axis, which is what makes them fast here. Of every case the last head of the last row is compared with a float32
reference, on the CPU.

Order: what XLA tunes on the GPU is compiled first, then PyTorch measures while our kernels are compiled, then ours are
measured, in groups of cases that share a profiler session. Rows are saved after each group.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from benchmarks.attention_peers import TorchPeers, fold_groups
from benchmarks.lowering import Program, Workshop
from benchmarks.stopwatch import Measurement, Stopwatch
from pallas_kernels import Importance, block_attention, dispatch
from pallas_kernels.reference import attention_reference, importance_reference

SHORT_FLOOR = 6e-6
TOLERANCE = 5e-3  # RMS error over RMS of bfloat16 results: outputs round at 2e-3
# The importance of one query, and that by page, goes through weights kept in bfloat16.
IMPORTANCE_TOLERANCE = 3e-3
# What is measured of importance, and its goal: of one query, of all, and of all by pages of 8 (what MAGE chooses by).
IMPORTANCES = {"one_row": "<=1.05", "all_rows": "<=1.25", "all_rows_by_page": None}
PAGE = 8


class Case(NamedTuple):
    """One attention problem: a block of `queries` over `entries` of a cache."""

    group_name: str  # "" for the long prefixes, "short" for pools
    entries: int
    batch: int
    model: str = "sdar-8b"
    queries: int = 32
    head_dim: int = 128

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and KV heads."""
        return {"sdar-8b": (32, 8), "fast-dllm-7b": (28, 4), "tiny": (4, 2)}[self.model]

    @property
    def id(self) -> str:
        entries = f"{self.entries // 1024}k" if self.entries % 1024 == 0 else str(self.entries)
        parts = ["attention", self.group_name, self.model if self.model != "sdar-8b" else "", entries, f"b{self.batch}"]
        return "/".join(part for part in parts if part)

    @property
    def q_shape(self) -> tuple[int, ...]:
        return (self.batch, self.queries, self.heads[0], self.head_dim)

    @property
    def kv_shape(self) -> tuple[int, ...]:
        return (self.batch, self.heads[1], self.entries, self.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.batch * self.heads[1] * self.entries * self.head_dim * 2


GOAL_CASES = [Case("", 65536, 1), Case("", 65536, 4)]
LONG = [Case("", n, b) for n in (8192, 16384, 32768, 131072) for b in (1, 2, 4, 8, 16)] + [
    Case("", n, b, "fast-dllm-7b") for n in (8192, 32768, 65536, 131072) for b in (1, 4, 16)
]
SHORT = [Case("short", n, b) for n in (1024, 2048, 4096, 8192) for b in (1, 2, 4, 8, 16)]
# Where jax.nn is measured too; elsewhere only PyTorch, which is faster in all of these.
JAX_PEERS = [Case("", 65536, 1), Case("", 65536, 4), Case("short", 4096, 4)]
GROUP = 11  # cases that share a profiler session
PREFILL_TOKENS = 32768
PREFILL_BLOCK = 32


def rows(context: dict[str, Any]) -> list[dict]:
    """All rows. ``context["copy_bandwidth"]``: bytes per second of a large device copy, measured in this run.

    ``context["quick"]``, if true, runs a tiny case with whatever implementation there is: for tests.
    ``context["save"]``, if there, is called with the rows so far after every group of cases.
    """
    return _Run(context).rows()


def attention(q, k, v, lengths, *, implementation: str, importance: str | None = None):
    """What is measured: (out, lse), or (out, importance), one of IMPORTANCES."""
    if importance is None:
        result = block_attention(q, k, v, lengths, implementation=implementation)
        return result.out, result.lse
    chosen = jnp.full(lengths.shape[:1], q.shape[1] // 2, jnp.int32) if importance == "one_row" else None
    how = {"importance": Importance(page=_page(importance)), "importance_rows": chosen}
    result = block_attention(q, k, v, lengths, implementation=implementation, **how)
    return result.out, result.importance


def _page(importance: str) -> int:
    return PAGE if importance.endswith("by_page") else 1


def requests(cases: list[Case], tokens: int) -> list[dict[str, Any]]:
    """What `benchmarks.torch_attention` reads: the cases and the prefill."""
    found = [
        {
            "id": case.id,
            "batch": case.batch,
            "queries": case.queries,
            "kv_heads": case.heads[1],
            "group": case.heads[0] // case.heads[1],
            "entries": case.entries,
            "head_dim": case.head_dim,
            "causal": False,
        }
        for case in cases
    ]
    return [*found, found[0] | {"id": "prefill", "batch": 1, "queries": tokens, "entries": tokens, "causal": True}]


def _take(noise: jax.Array, start: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    """An array of its own from the rows of `noise` `[R, 128]`: compiles in less time than a random generator."""
    count = -(-int(np.prod(shape)) // noise.shape[1])
    return jax.lax.dynamic_slice_in_dim(noise, start, count).reshape(-1)[: int(np.prod(shape))].reshape(shape)


@functools.partial(jax.jit, static_argnames="chunks")
def _noise(chunks: int) -> jax.Array:
    """Standard normal numbers, 2**20 rows at a time: bf16 `[chunks * 2**20, 128]` (fewer rows of a small one)."""

    def one(i, noise):
        values = jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (rows, 128), jnp.bfloat16)
        return jax.lax.dynamic_update_slice_in_dim(noise, values, i * rows, 0)

    rows = 2**20 if chunks > 1 else 2**12
    return jax.lax.fori_loop(0, chunks, one, jnp.zeros((chunks * rows, 128), jnp.bfloat16))


def _last_head(q, k, v, found):
    """The last KV head of the last row: its queries, K and V, and what was found for it (out or importance)."""
    group = q.shape[2] // k.shape[1]
    found = found[-1:, -1:] if found.ndim == 3 else found[-1:, :, -group:]
    return q[-1:, :, -group:], k[-1:, -1:], v[-1:, -1:], found


class _Run:
    """One run: the compiled programs, the inputs, the rows."""

    def __init__(self, context: dict[str, Any]):
        self.context = context
        self.bandwidth = context["copy_bandwidth"]
        self.quick = context.get("quick", False)
        self.save = context.get("save", lambda rows: None)
        self.long = [Case("", 256, 1, "tiny", 8, 16)] if self.quick else GOAL_CASES + LONG
        self.short = [Case("short", 64, 2, "tiny", 8, 16)] if self.quick else SHORT
        self.tokens = 64 if self.quick else PREFILL_TOKENS
        self.with_importance = self.long[:1] if self.quick else GOAL_CASES
        self.on_gpu = jax.default_backend() == "gpu"
        self.implementation: dispatch.Implementation = "mosaic_gpu" if self.on_gpu else "xla"
        self.out: list[dict] = []

    def rows(self) -> list[dict]:
        heads, kv_heads, dim = (4, 2, 16) if self.quick else (32, 8, 128)
        self.prefill_shapes = ((1, self.tokens, heads, dim), (1, kv_heads, self.tokens, dim))
        with Workshop.of(self.context) as self.shop, ThreadPoolExecutor(2) as self.checking:
            with TorchPeers(requests(self.long + self.short, self.tokens), wanted=not self.quick) as torch:
                self._begin()
                common.stage("attention: compiling what XLA tunes on the GPU")
                for name in self.tuned:
                    _ = self.shop[name]
                common.stage("attention: PyTorch measures")
                self.torch_us = torch.times()
            common.stage("attention: compiling our kernels")
            self.noise = _noise(1 if self.quick else 17)
            # What matters most first: a run that is cut short has it.
            cases = self.long + self.short
            first = self.with_importance + [case for case in self.short if case.entries in (1024, 8192)]
            cases = first + [case for case in cases if case not in first]
            for start in range(0, len(cases), GROUP):
                self._group(cases[start : start + GROUP])
                if start == 0:
                    self._importance()
                    self._prefill()
                self.save(self.out + self._summaries())
        return self.out + self._summaries()

    def _begin(self) -> None:
        """Has everything compiled."""
        bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        noise = bf16((2**12 if self.quick else 17 * 2**20, 128))
        plain = functools.partial(attention, implementation=self.implementation)
        kernels: dict[Any, Program] = {}
        simple: dict[Any, Program] = {}
        tuned: dict[Any, Program] = {}
        for case in dict.fromkeys(self.with_importance + self.short + self.long):
            q, kv = bf16(case.q_shape), bf16(case.kv_shape)
            kernels["ours", case] = (plain, (q, kv, kv, i32((case.batch,))))
            simple["pick", case] = (_last_head, (q, kv, kv, q))
        for case in self.with_importance:
            q, kv = bf16(case.q_shape), bf16(case.kv_shape)
            for which in IMPORTANCES:
                fn = functools.partial(plain, importance=which)
                kernels[which, case] = (fn, (q, kv, kv, i32((case.batch,))))
                weights = jax.ShapeDtypeStruct((*case.kv_shape[:2], case.entries // _page(which)), jnp.float32)
                simple["pick", which, case] = (_last_head, (q, kv, kv, weights))
        q, kv = map(bf16, self.prefill_shapes)
        simple["pick", "prefill"] = (_last_head, (q, kv, kv, q))
        kernels["prefill"] = (plain, (q, kv, kv, i32((1, self.tokens // PREFILL_BLOCK))))
        shapes = {shape for case in self.long + self.short for shape in (case.q_shape, case.kv_shape)}
        for shape in shapes | set(self.prefill_shapes):
            simple["take", shape] = (functools.partial(_take, shape=shape), (noise, i32(())))
        if self.on_gpu:
            for case in JAX_PEERS:
                folded = jax.eval_shape(fold_groups, bf16(case.q_shape), bf16(case.kv_shape), bf16(case.kv_shape))
                simple["fold", case] = (fold_groups, (bf16(case.q_shape), bf16(case.kv_shape), bf16(case.kv_shape)))
                for name in ("cudnn", "xla"):
                    fn = functools.partial(jax.nn.dot_product_attention, implementation=name)
                    tuned[name, case] = (fn, folded)
            fn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
            by_token = bf16((1, self.tokens, kv.shape[1], kv.shape[3]))
            tuned["cudnn", "prefill"] = (fn, (q, by_token, by_token))
            simple["by token"] = (functools.partial(jnp.swapaxes, axis1=1, axis2=2), (kv,))
        self.tuned = list(tuned)
        self.shop.add(tuned, kernels=False)
        self.shop.add(simple, kernels=False)
        self.shop.add(kernels)

    def _draw(self, shape: tuple[int, ...], seed: int) -> jax.Array:
        return self.shop["take", shape](self.noise, np.int32(977 * seed))

    def _inputs(self, case: Case) -> list[tuple]:
        """(q, k, v, lengths) to rotate through; a K of one is the V of the one before."""
        count = common.input_sets(case.nbytes)
        q = self._draw(case.q_shape, 0)
        kv = [self._draw(case.kv_shape, 1 + i) for i in range(count + 1)]
        lengths = jnp.full((case.batch,), case.entries, jnp.int32)
        return [(q, kv[i], kv[i + 1], lengths) for i in range(count)]

    def _group(self, cases: list[Case]) -> None:
        peers: dict[Case, dict[str, Measurement]] = {case: {} for case in cases}
        ours, checks = {}, []
        with Stopwatch() as watch:
            for case in cases:
                inputs, program = self._inputs(case), self.shop["ours", case]
                q, k, v, _ = inputs[0]
                picked = self.shop["pick", case](q, k, v, program(*inputs[0])[0])
                checks.append((case.id, self.checking.submit(_attention_error, *map(np.asarray, picked))))
                ours[case] = watch.time(program, inputs)
                if self.on_gpu and case in JAX_PEERS:
                    folded = [self.shop["fold", case](*one[:3]) for one in inputs]
                    for name in ("cudnn", "xla"):
                        peers[case][f"jax_{name}"] = watch.time(self.shop[name, case], folded, repeats=10)
        for id, error in checks:
            _require(id, error.result(), TOLERANCE)
        for case in cases:
            measured = {name: time.us for name, time in peers[case].items()}
            self.out += _attention_rows(case, ours[case], measured | _known(self.torch_us.get(case.id)), self.bandwidth)
        common.stage(f"attention: measured {', '.join(case.id.removeprefix('attention/') for case in cases)}")

    def _summaries(self) -> list[dict]:
        """The worst of the cases measured so far."""
        found = []
        for name, cases in (("all", self.long), ("short", self.short)):
            mine = {f"{case.id}/vs_best_peer" for case in cases}
            ratios = {row["id"]: row["value"] for row in self.out if row["id"] in mine}
            if ratios:
                worst = min(ratios, key=lambda key: ratios[key])
                detail = {"worst": worst, "cases": len(ratios)}
                id = f"attention/{name}/worst_vs_best_peer"
                found.append(common.row(id, ratios[worst], "x", goal=">=1.0", detail=detail))
        over = {row["id"]: row["value"] for row in self.out if row["id"].endswith("/over_floor")}
        if over:
            worst = max(over, key=lambda key: over[key])
            detail = {"worst": worst, "cases": len(over)}
            found.append(common.row("attention/short/worst_over_floor", over[worst], "x", goal="<=2.0", detail=detail))
        return found

    def _importance(self) -> None:
        """The overhead of each kind of importance over the attention alone."""
        pairs, checks = {}, []
        with Stopwatch() as watch:
            for case in self.with_importance:
                inputs, plain = self._inputs(case), self.shop["ours", case]
                q, k, v, _ = inputs[0]
                for which in IMPORTANCES:
                    program = self.shop[which, case]
                    picked = self.shop["pick", which, case](q, k, v, program(*inputs[0])[1])
                    one = case.queries // 2 if which == "one_row" else None
                    error = self.checking.submit(_importance_error, one, _page(which), *map(np.asarray, picked))
                    checks.append((f"importance/{which}", error))
                    # The two in turn, so that a drift of the clocks meets both.
                    pairs[case, which] = [(watch.time(plain, inputs), watch.time(program, inputs)) for _ in range(2)]
        for id, error in checks:
            _require(id, error.result(), IMPORTANCE_TOLERANCE)
        for (case, which), times in pairs.items():
            base, taken = (min(pair[i].time for pair in times) for i in range(2))
            detail = {
                "attention_us": base.us,
                "with_importance_us": taken.us,
                "floor_us": case.nbytes / self.bandwidth * 1e6,
                "kernels_us": {kernel[:48]: seconds * 1e6 for kernel, seconds in taken.kernels},
            }
            goals = case == self.with_importance[0]
            goal = IMPORTANCES[which] if goals else None
            id = f"importance/{which}/overhead" if goals else f"importance/b{case.batch}/{which}/overhead"
            self.out.append(common.row(id, taken.seconds / base.seconds, "x", goal=goal, detail=detail))
        common.stage("attention: measured importance")

    def _prefill(self) -> None:
        """Block-causal attention of a whole prompt beside cudnn's plain causal one, in TFLOP/s."""
        tokens, ours = self.tokens, self.shop["prefill"]
        q_shape, kv_shape = self.prefill_shapes
        q, k, v = (self._draw(shape, seed) for seed, shape in enumerate((q_shape, kv_shape, kv_shape)))
        lengths = jnp.arange(PREFILL_BLOCK, tokens + 1, PREFILL_BLOCK, dtype=jnp.int32)[None]
        picked = self.shop["pick", "prefill"](q, k, v, ours(q, k, v, lengths)[0])
        last = [np.asarray(x) for x in picked]
        for i in (0, 3):
            last[i] = last[i][:, tokens - PREFILL_BLOCK :]
        _require("prefill", _attention_error(*last), TOLERANCE)
        with Stopwatch() as watch:
            taken = watch.time(ours, [(q, k, v, lengths)], repeats=5)
            if self.on_gpu:
                by_token = (q, *map(self.shop["by token"], (k, v)))
                cudnn = watch.time(self.shop["cudnn", "prefill"], [by_token], repeats=5)
        # Every query sees its whole block: half a block more than plain causal attention on average.
        per_entry = 4 * q_shape[2] * q_shape[3] * tokens
        flops, causal_flops = per_entry * (tokens + PREFILL_BLOCK) / 2, per_entry * (tokens + 1) / 2
        detail = {"ours_us": taken.us, "ours_tflops": flops / taken.seconds / 1e12}
        if not self.on_gpu:
            self.out.append(common.row("prefill/quick/us", taken.us, "us"))
            return
        peers = _known(self.torch_us.get("prefill")) | {"jax_cudnn": cudnn.us}
        detail |= {f"{name}_tflops": causal_flops / us / 1e6 for name, us in peers.items()}
        best = max(value for name, value in detail.items() if "cudnn" in name)
        ratio = detail["ours_tflops"] / best
        self.out.append(common.row("prefill/32k/vs_cudnn_causal", ratio, "x", goal=">=0.9", detail=detail))
        common.stage("attention: measured prefill")


def _known(times: dict[str, float | None] | None) -> dict[str, float]:
    """Those of a case's peers that could run it."""
    return {name: us for name, us in (times or {}).items() if us is not None}


def _attention_rows(case: Case, taken: Measurement, peers: dict[str, float], bandwidth: float) -> list[dict]:
    floor = case.nbytes / bandwidth
    detail = {
        "ours_us": taken.us,
        "peers_us": peers,
        "floor_us": floor * 1e6,
        "kernels_us": {name[:48]: seconds * 1e6 for name, seconds in taken.time.kernels},
    }
    goals = case in GOAL_CASES
    result = []
    if peers:
        ratio = min(peers.values()) / taken.us
        result.append(common.row(f"{case.id}/vs_best_peer", ratio, "x", goal=">=1.4" if goals else None, detail=detail))
    goal = None if not goals else ">=0.8" if case.batch == 4 else ">=0.65"
    result.append(common.row(f"{case.id}/copy_fraction", floor / taken.seconds, "", goal=goal, detail=detail))
    if case.group_name == "short":
        result.append(common.row(f"{case.id}/over_floor", taken.seconds / max(floor, SHORT_FLOOR), "x", detail=detail))
    return result


_attention_reference = jax.jit(attention_reference)
_importance_reference = jax.jit(importance_reference)


def _attention_error(q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> float:
    """RMS error of `out` over all entries, beside the reference on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        expected, _ = _attention_reference(q, k, v, np.full((1, 1), k.shape[2], np.int32))
        return common.rms_error(out, expected)


def _importance_error(
    one: int | None, page: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, weights: np.ndarray
) -> float:
    """RMS error of the importance of query row `one`, or of all rows, by page."""
    chosen = np.ones((1, q.shape[1]), bool) if one is None else (np.arange(q.shape[1]) == one)[None]
    with jax.default_device(jax.devices("cpu")[0]):
        expected = _importance_reference(q, k, np.full((1, 1), k.shape[2], np.int32), chosen)
        return common.rms_error(weights, expected.reshape(*weights.shape, page).sum(axis=-1))


def _require(what: str, error: float, tolerance: float) -> None:
    if not error <= tolerance:
        raise AssertionError(f"{what}: RMS error {error:.2e}, above {tolerance:.0e}")


if __name__ == "__main__":
    common.run_part(rows, __doc__)
