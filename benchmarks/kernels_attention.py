"""`block_attention` beside its floors and its peers: long prefixes, short pools, importance, prefill.

    python -m benchmarks.kernels_attention         # or as a part of benchmarks.kernels

The floor of a case is the bytes of K and V over the bandwidth of a large device copy measured in the same run; for
short pools at least 6 us, about what two launches take. Peers: PyTorch's SDPA (flash and cudnn) in a process of its own
on every case, jax.nn.dot_product_attention (cudnn and xla) on some, all with the query heads of a group folded into the
query axis, which is what makes them fast here. Results are compared with a float32 reference.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import common
from pallas_kernels import Importance, block_attention, dispatch
from pallas_kernels.reference import attention_reference, importance_reference

SHORT_FLOOR = 6e-6
TOLERANCE = 5e-3  # RMS error over RMS of bfloat16 results: outputs round at 2e-3
# The importance of one query goes through weights kept in bfloat16.
IMPORTANCE_TOLERANCE = 3e-3


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
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.batch * self.heads[1] * self.entries * self.head_dim * 2


GOAL_CASES = [Case("", 65536, 1), Case("", 65536, 4)]
LONG = [Case("", n, b) for n in (8192, 16384, 32768, 131072) for b in (1, 2, 4, 8, 16)] + [
    Case("", n, b, "fast-dllm-7b") for n in (8192, 32768, 65536, 131072) for b in (1, 4, 16)
]
SHORT = [Case("short", n, b) for n in (1024, 2048, 4096, 8192) for b in (1, 2, 4, 8, 16)]
# Where jax.nn is measured too; elsewhere only PyTorch, which is faster in all of these.
JAX_PEERS = {Case("", 65536, 1), Case("", 65536, 4), Case("", 8192, 1), Case("short", 1024, 1), Case("short", 4096, 4)}
PREFILL_TOKENS = 32768
PREFILL_BLOCK = 32


def rows(context: dict[str, Any]) -> list[dict]:
    """All rows. ``context["copy_bandwidth"]``: bytes per second of a large device copy, measured in this run.

    ``context["quick"]``, if true, runs a tiny case with whatever implementation there is: for tests.
    """
    bandwidth = context["copy_bandwidth"]
    quick = context.get("quick", False)
    long = [Case("", 256, 1, "tiny", 8, 16)] if quick else GOAL_CASES + LONG
    short = [Case("short", 64, 2, "tiny", 8, 16)] if quick else SHORT
    tokens = 64 if quick else PREFILL_TOKENS
    torch_us = {} if quick else _torch_times(long + short, tokens)
    out = []
    for name, cases in (("all", long), ("short", short)):
        found = [_attention(case, bandwidth, torch_us.get(case.id, {})) for case in cases]
        out += [row for case_rows in found for row in case_rows]
        ratios = {row["id"]: row["value"] for row in out if row["id"].endswith("/vs_best_peer")}
        mine = {f"{case.id}/vs_best_peer" for case in cases}
        ratios = {key: value for key, value in ratios.items() if key in mine}
        if ratios:
            worst = min(ratios, key=lambda key: ratios[key])
            detail = {"worst": worst, "cases": len(ratios)}
            goal = ">=1.0"
            out.append(common.row(f"attention/{name}/worst_vs_best_peer", ratios[worst], "x", goal=goal, detail=detail))
    over = {row["id"]: row["value"] for row in out if row["id"].endswith("/over_floor")}
    worst = max(over, key=lambda key: over[key])
    detail = {"worst": worst, "cases": len(over)}
    out.append(common.row("attention/short/worst_over_floor", over[worst], "x", goal="<=2.0", detail=detail))
    out += _importance(long[0], bandwidth, goals=True)
    if not quick:
        out += _importance(GOAL_CASES[1], bandwidth, goals=False)
    return out + _prefill(tokens, torch_us.get("prefill", {}), quick)


def _torch_times(cases: list[Case], tokens: int) -> dict[str, dict[str, float | None]]:
    """Microseconds of PyTorch's backends by case, from a process of its own."""
    requests = [
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
    requests.append(requests[0] | {"id": "prefill", "batch": 1, "queries": tokens, "entries": tokens, "causal": True})
    command = [sys.executable, "-m", "benchmarks.torch_attention"]
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, check=False)
    print(done.stderr[-2000:], file=sys.stderr)
    if done.returncode:
        raise RuntimeError(f"benchmarks.torch_attention failed with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    return jax.random.normal(key, shape, dtype)


def _inputs(case: Case) -> list[tuple]:
    """(q, k, v, lengths) to rotate through; a K of one is the V of the one before."""
    count = common.input_sets(case.nbytes)
    heads, kv_heads = case.heads
    q = _normal(jax.random.key(0), (case.batch, case.queries, heads, case.head_dim), jnp.bfloat16)
    shape = (case.batch, kv_heads, case.entries, case.head_dim)
    kv = [_normal(jax.random.key(1 + i), shape, jnp.bfloat16) for i in range(count + 1)]
    lengths = jnp.full((case.batch,), case.entries, jnp.int32)
    return [(q, kv[i], kv[i + 1], lengths) for i in range(count)]


def _ours(**options):
    implementation: dispatch.Implementation = "mosaic_gpu" if jax.default_backend() == "gpu" else "xla"

    def call(q, k, v, lengths):
        result = block_attention(q, k, v, lengths, implementation=implementation, **options)
        return (result.out, result.lse) if result.importance is None else (result.out, result.importance)

    return jax.jit(call)


def _attention(case: Case, bandwidth: float, torch_us: dict[str, float | None]) -> list[dict]:
    inputs = _inputs(case)
    ours = _ours()
    q, k, v, lengths = inputs[0]
    out, _ = ours(*inputs[0])
    if case.entries <= 8192 or case in GOAL_CASES:  # the reference holds every score in float32
        _require(case.id, out[:1], attention_reference(q[:1], k[:1], v[:1], lengths[:1, None])[0], TOLERANCE)
    taken = common.device_time(ours, inputs)
    floor = case.nbytes / bandwidth
    peers = {name: us for name, us in torch_us.items() if us is not None}
    if case in JAX_PEERS:
        peers |= _jax_peers(inputs)
    detail = {
        "ours_us": taken.us,
        "peers_us": peers,
        "floor_us": floor * 1e6,
        "kernels_us": {name[:48]: seconds * 1e6 for name, seconds in taken.kernels},
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


def _jax_peers(inputs: list[tuple]) -> dict[str, float]:
    """Microseconds of jax.nn.dot_product_attention with folded groups, everything in its own layout `[B, T, K, D]`."""

    @jax.jit
    def fold(q, k, v):
        b, t, _, d = q.shape
        q = jnp.moveaxis(q.reshape(b, t, k.shape[1], -1, d), 3, 1).reshape(b, -1, k.shape[1], d)
        return q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

    folded = [fold(q, k, v) for q, k, v, _ in inputs]
    peers = {}
    for name in ("cudnn", "xla"):
        call = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation=name))
        peers[f"jax_{name}"] = common.device_time(call, folded, repeats=10).us
    return peers


def _importance(case: Case, bandwidth: float, *, goals: bool) -> list[dict]:
    inputs = _inputs(case)
    q, k, _, lengths = inputs[0]
    one = jnp.full((case.batch,), case.queries // 2, jnp.int32)
    variants = {
        "one_row": (_ours(importance=Importance(), importance_rows=one), jnp.arange(case.queries) == case.queries // 2),
        "all_rows": (_ours(importance=Importance()), jnp.ones((case.queries,), bool)),
    }
    plain = _ours()
    result = []
    for name, (f, chosen) in variants.items():
        weight = f(*inputs[0])[1][:1]
        expected = importance_reference(q[:1], k[:1], lengths[:1, None], chosen[None])
        _require(f"importance/{name}", weight, expected, IMPORTANCE_TOLERANCE)
        # The two in turn, so that a drift of the clocks meets both.
        times = [(common.device_time(plain, inputs), common.device_time(f, inputs)) for _ in range(2)]
        base, taken = (min(pair[i] for pair in times) for i in range(2))
        detail = {
            "attention_us": base.us,
            "with_importance_us": taken.us,
            "floor_us": case.nbytes / bandwidth * 1e6,
            "kernels_us": {kernel[:48]: seconds * 1e6 for kernel, seconds in taken.kernels},
        }
        goal = {"one_row": "<=1.05", "all_rows": "<=1.25"}[name] if goals else None
        id = f"importance/{name}/overhead" if goals else f"importance/b{case.batch}/{name}/overhead"
        result.append(common.row(id, taken.seconds / base.seconds, "x", goal=goal, detail=detail))
    return result


def _prefill(tokens: int, torch_us: dict[str, float | None], quick: bool) -> list[dict]:
    heads, kv_heads, dim = (4, 2, 16) if quick else (32, 8, 128)
    q = _normal(jax.random.key(0), (1, tokens, heads, dim), jnp.bfloat16)
    k = _normal(jax.random.key(1), (1, kv_heads, tokens, dim), jnp.bfloat16)
    v = _normal(jax.random.key(2), (1, kv_heads, tokens, dim), jnp.bfloat16)
    lengths = jnp.arange(PREFILL_BLOCK, tokens + 1, PREFILL_BLOCK, dtype=jnp.int32)[None]
    ours = _ours()
    last = slice(tokens - PREFILL_BLOCK, tokens)
    expected, _ = attention_reference(q[:, last], k, v, lengths[:, -1:])
    _require("prefill", ours(q, k, v, lengths)[0][:, last], expected, TOLERANCE)
    taken = common.device_time(ours, [(q, k, v, lengths)], repeats=5)
    # Every query sees its whole block: half a block more than plain causal attention on average.
    flops = 4 * heads * dim * tokens * (tokens + PREFILL_BLOCK) / 2
    causal_flops = 4 * heads * dim * tokens * (tokens + 1) / 2
    detail = {"ours_us": taken.us, "ours_tflops": flops / taken.seconds / 1e12}
    peers = {name: us for name, us in torch_us.items() if us is not None}
    if jax.default_backend() == "gpu":
        cudnn = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"))
        peers["jax_cudnn"] = common.device_time(
            cudnn, [(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))], repeats=5
        ).us
    detail |= {f"{name}_tflops": causal_flops / us / 1e6 for name, us in peers.items()}
    if not peers:
        return [common.row("prefill/quick/us", taken.us, "us")]
    best = max(value for name, value in detail.items() if "cudnn" in name)
    ratio = detail["ours_tflops"] / best
    return [common.row("prefill/32k/vs_cudnn_causal", ratio, "x", goal=">=0.9", detail=detail)]


def _require(what: str, value: jax.Array, expected: jax.Array, tolerance: float) -> None:
    error = common.rms_error(value, expected)
    if not error <= tolerance:
        raise AssertionError(f"{what}: RMS error {error:.2e}, above {tolerance:.0e}")


if __name__ == "__main__":
    common.run_part(rows, __doc__)
