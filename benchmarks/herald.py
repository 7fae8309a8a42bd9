"""`python -m benchmarks.herald`: the HERALD plan beside the dense plan, under one cap on device memory.

Random weights in real shapes, bfloat16, blocks of 32 in fixed steps. The device memory that JAX may use is capped for
both sides alike; the dense plan, the strongest baseline there is here, keeps its KV in device memory and runs the
largest batch that fits. Caches are filled with random K and V instead of a prefill. Times are wall-clock medians over
blocks.

Every case is measured with the scan on the CPU and with the index on the device; rows that do not name a selector take
the faster one of each case and say which.

What is exposed of a block is its time less that of its own steps and draft, timed without all that happens beside them.

The plan is the default but for `draft_at`, "auto", and `keep_bonus`, 0. Entries score nearly alike with random weights:
with the default bonus a pool keeps nearly all it holds, and 2 % of the traffic is left, where text of a trained model
leaves 46 % (`benchmarks.herald_traffic`). Without it 80 % is, more than such text ever leaves.

The parts can be run apart, each with an `--out` of its own; `--merge FILES` joins what they wrote, and
`benchmarks.herald_plot` draws it. A case that the host may have no room for is left out: the others are measured, and
the run ends with a sentence and status 1.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import common
from benchmarks.herald_case import (
    Case,
    HostRoom,
    cache_bytes,
    cap_device_memory,
    dense,
    drafted_after,
    host_read_bandwidth,
    index_bits_that_fit,
    plan_of,
    rows_that_fit,
    rows_with_index,
)
from benchmarks.shapes import SHAPES, weight_bytes
from herald_jax import Herald, ModelConfig, host_kv
from herald_jax.model import Params, init_params

Add = Callable[..., None]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default="sdar8b,fdv2_7b", help="comma-separated; the goals are sdar8b's")
    parser.add_argument(
        "--contexts", default="16,32,64,128", help="of the latency part, in units of 1024 tokens; 0: leave it out"
    )
    parser.add_argument("--throughput", default="64", help="contexts of the throughput part, likewise")
    parser.add_argument(
        "--rows", type=int, default=8,
        help="batch under HERALD in the throughput part at 64K, and at other contexts so many that their tokens are as "
        "many; fewer where pools and index do not fit under the cap (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--budgets", default="0.05", help="comma-separated; the goals are those of 0.05")
    parser.add_argument("--selectors", default="cpu,index", help="comma-separated (default %(default)s)")
    parser.add_argument("--cap", type=float, default=40, help="device memory in GB (default %(default)s)")
    parser.add_argument("--over-cap", type=int, default=0, help="a context beyond the cap, likewise, such as 256")
    parser.add_argument(
        "--keep-bonus", type=float, default=0.0, help="the plan's keep_bonus (default %(default)s; see above)"
    )
    parser.add_argument("--scan", default="auto", help="the plan's scan: native, xla or auto (default %(default)s)")
    parser.add_argument("--measure", action="store_true", help="read the device's clock around each fetch, too")
    parser.add_argument("--blocks", type=int, default=8, help="timed blocks of each case (default %(default)s)")
    common.merge_option(parser)
    common.output_option(parser)
    return parser.parse_args()


GOAL_SHAPE, GOAL_BUDGET = "sdar8b", 0.05
GOALS = {
    "latency/longest/speedup": ">=1.59",
    "latency/longest/cpu": ">=1.59",
    "latency/all/worst_speedup": ">=0.95",
    "latency/all/worst_cpu": ">=0.95",
    "throughput/64k/steps32/cpu": ">=2.47",
    "throughput/64k/steps32/best": ">=4",
    "throughput/64k/steps10/best": ">=2.5",
    "pipeline/exposed_fraction": "<=0.05",
    "selection/cpu/host_bandwidth_fraction": ">=0.85",
}


def thousands(text: str) -> list[int]:
    """Contexts in tokens from a list of thousands; "0" is none."""
    return [1024 * int(part) for part in text.split(",") if int(part)]


def rows_at(options: argparse.Namespace, context: int) -> int:
    """HERALD's batch in the throughput part: at every context the same number of tokens."""
    return max(int(options.rows * 64 * 1024 / context), 1)


def cases(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Rows and context of every cache in host memory that a shape needs."""
    latency = [(1, max(thousands(options.contexts), default=0))]
    throughput = [(rows_at(options, context), context) for context in thousands(options.throughput)]
    return [case for case in (*latency, *throughput, (1, 1024 * options.over_cap)) if case[1]]


def reserve_host_memory(options: argparse.Namespace) -> None:
    """Let JAX page-lock what the largest case needs and not much more. Has to come before JAX's first use.

    Not a default: `import herald_jax` has set the variable already, to all memory that the machine has.
    """
    needed = [cache_bytes(SHAPES[name], *case) for name in options.shapes.split(",") for case in cases(options)]
    os.environ[host_kv.LIMIT_VARIABLE] = str(int(1.1 * max(needed, default=0) / 1e9) + 2)


def main(options: argparse.Namespace) -> None:
    cap = options.cap * 1e9
    out: list[dict[str, Any]] = []
    room = HostRoom()

    def add(id: str, value: float, unit: str = "x", **detail: Any) -> None:
        out.append(common.row(id, value, unit, goal=GOALS.get(id), detail=detail or None))
        print(out[-1]["id"], out[-1]["value"], out[-1].get("detail", ""), flush=True)
        common.write_results("herald", out, folder=options.out)
        common.stage(id)

    budgets = [float(b) for b in options.budgets.split(",")]
    for name in options.shapes.split(","):
        config = SHAPES[name]
        params = init_params(config, jax.random.key(0))
        common.stage(f"{name}: weights made")
        contexts = thousands(options.contexts)
        if contexts and room.has(config, 1, max(contexts)):
            _latency(name, config, params, contexts, budgets, options, add)
        for context in thousands(options.throughput):
            if room.has(config, rows_at(options, context), context):
                _throughput(name, config, params, context, budgets, options, add)
        context = 1024 * options.over_cap
        if name == GOAL_SHAPE and context and room.has(config, 1, context):
            case = Case(config, params, 1, context)
            common.stage(f"{name}: {case.host.nbytes / 1e9:.0f} GB in host memory")
            got = case.measure(plan_of(budgets[0], keep_bonus=options.keep_bonus), context, 32, 2)
            stats = got["stats"]
            add(
                "context_over_cap/tokens", context, "tokens", host_bytes=stats.host_bytes, pool_bytes=stats.pool_bytes,
                weight_bytes=weight_bytes(config), cap_bytes=cap, block_ms=got["block"] * 1e3,
                steps_and_draft_ms=got["own"] * 1e3, scan_ms=got["scan"] * 1e3, scan_gbs=got["scan_rate"] / 1e9,
            )  # fmt: skip
            del case
        del params
    common.print_rows(out)
    if room.refused:
        raise SystemExit("error: left out: " + "; ".join(room.refused))


def _plans(options: argparse.Namespace, config: ModelConfig, budget: float, rows: int, context: int) -> list[Herald]:
    """The plans that a case is measured with: one for each selector."""
    bits = index_bits_that_fit(config, budget, rows, context, options.cap * 1e9)
    return [
        plan_of(budget, selector, bits, keep_bonus=options.keep_bonus, measure=options.measure, scan=options.scan)
        for selector in options.selectors.split(",")
    ]


def _detail(config: ModelConfig, plan: Herald, rows: int, context: int, steps: int, got: dict[str, Any]) -> Any:
    """What a case's row tells of it."""
    return {
        "block_ms": got["block"] * 1e3,
        "steps_and_draft_ms": got["own"] * 1e3,
        "exposed": got["exposed"],
        "each_ms": [1e3 * x for x in got["each"]],
        "drafted_after": drafted_after(config, plan, rows, context, steps),
        "fetched_bytes": got["fetched"],
        "reused_bytes": got["reused"],
        "pool_bytes": got["stats"].pool_bytes,
        "keep_bonus": plan.bonus,
        **({"fetch_ms": got["fetch"] * 1e3, "fetch_exposed_ms": got["fetch_exposed"] * 1e3} if plan.measure else {}),
    } | (
        {"scan_ms": got["scan"] * 1e3, "scan_gbs": got["scan_rate"] / 1e9, "scanned_by": got["stats"].scanned_by}
        if plan.selector == "cpu"
        else {"index_bytes": got["stats"].index_bytes, "index_bits": plan.index_bits}
    )


def _latency(
    name: str, config: ModelConfig, params: Params, contexts: list[int], budgets: list[float],
    options: argparse.Namespace, add: Add,
) -> None:  # fmt: skip
    """One row of every context, under both plans."""
    bases = dense(config, params, 1, contexts)
    common.stage(f"{name}: dense plan measured")
    longest = max(contexts)
    case = Case(config, params, 1, longest)
    common.stage(f"{name}: {case.host.nbytes / 1e9:.0f} GB in host memory")
    for budget in budgets:
        gains: dict[str, dict[int, float]] = {}
        exposed: dict[str, float] = {}
        for plan in _plans(options, config, budget, 1, longest):
            gains[plan.selector] = {}
            for context in contexts:
                got = case.measure(plan, context, 32, options.blocks)
                base = bases[context].block(32)
                gains[plan.selector][context] = gain = base / got["block"]
                add(
                    f"latency_case/{name}/{context // 1024}k/b1/{budget:g}/{plan.selector}", gain,
                    dense_block_ms=base * 1e3, **_detail(config, plan, 1, context, 32, got),
                )  # fmt: skip
                if got["scan"] < got["own"]:
                    exposed[f"{context // 1024}k, {plan.selector}"] = got["exposed"]
            if plan.selector == "cpu":
                scanned = got
        if name != GOAL_SHAPE or budget != GOAL_BUDGET:
            continue
        best = {context: max(gains, key=lambda selector: gains[selector][context]) for context in contexts}
        add("latency/longest/speedup", gains[best[longest]][longest], selector=best[longest])
        worst = min(contexts, key=lambda context: gains[best[context]][context])
        add("latency/all/worst_speedup", gains[best[worst]][worst], selector=best[worst], context=worst)
        if exposed:
            most = max(exposed, key=lambda which: exposed[which])
            over = "cases without a scan, or one that is shorter than denoising"
            add("pipeline/exposed_fraction", exposed[most], "", of=most, over=over)
        if "cpu" not in gains:
            continue
        add("latency/longest/cpu", gains["cpu"][longest])
        worst = min(contexts, key=lambda context: gains["cpu"][context])
        add("latency/all/worst_cpu", gains["cpu"][worst], context=worst)
        rate = host_read_bandwidth(case.host)
        add(
            "selection/cpu/host_bandwidth_fraction", scanned["scan_rate"] / rate, "", host_read_gbs=rate / 1e9,
            scan_gbs=scanned["scan_rate"] / 1e9,
        )  # fmt: skip
        moved = scanned["fetched"] / max(scanned["fetched"] + scanned["reused"], 1)
        add("gather/reuse/random_weights/traffic_fraction", moved, "")  # of a trained model: benchmarks.herald_traffic


def _throughput(
    name: str, config: ModelConfig, params: Params, context: int, budgets: list[float], options: argparse.Namespace,
    add: Add,
) -> None:  # fmt: skip
    """Rows of one context, beside as many as the dense plan has room for."""
    alone = rows_that_fit(config, context, options.cap * 1e9)
    if alone < 1:
        raise SystemExit(f"error: not one row of {context} tokens fits {options.cap} GB; choose a larger --cap")
    times = dense(config, params, alone, [context])[context]
    common.stage(f"{name}: dense plan measured with {alone} rows")
    case: Case | None = None
    for budget in budgets:
        rows = rows_at(options, context)
        if "index" in options.selectors.split(","):
            rows = rows_with_index(config, budget, rows, context, options.cap * 1e9)
        if rows < 1:
            raise SystemExit(
                f"error: no row of {context} tokens with an index fits {options.cap} GB; choose a larger --cap"
            )
        if case is None or case.batch != rows:
            case = None  # its cache goes first
            case = Case(config, params, rows, context)
            common.stage(f"{name}: {rows} rows, {case.host.nbytes / 1e9:.0f} GB in host memory")
        plans = _plans(options, config, budget, rows, context)
        for steps in (32, 10):
            base, gains = times.block(steps), {}
            for plan in plans:
                if plan.selector == "cpu" and steps != 32:
                    continue  # the scan does not get shorter with the block
                got = case.measure(plan, context, steps, options.blocks)
                gains[plan.selector] = gain = (rows / got["block"]) / (alone / base)
                add(
                    f"throughput_case/{name}/{context // 1024}k/steps{steps}/{budget:g}/{plan.selector}", gain,
                    rows=rows, dense_rows=alone, dense_block_ms=base * 1e3, host_bytes=got["stats"].host_bytes,
                    cap_bytes=options.cap * 1e9, **_detail(config, plan, rows, context, steps, got),
                )  # fmt: skip
            if name != GOAL_SHAPE or budget != GOAL_BUDGET or not gains:
                continue
            row = f"throughput/{context // 1024}k/steps{steps}"
            if "cpu" in gains:
                add(f"{row}/cpu", gains["cpu"])
            best = max(gains, key=lambda selector: gains[selector])
            add(f"{row}/best", gains[best], selector=best)


if __name__ == "__main__":
    options = _options()
    if options.merge:
        common.print_rows(common.merge_results("herald", options.merge, folder=options.out))
        raise SystemExit
    cap_device_memory(options.cap)
    reserve_host_memory(options)
    main(options)
