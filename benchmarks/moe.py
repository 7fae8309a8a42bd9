"""`python -m benchmarks.moe`: mixtures of experts, milliseconds per denoising step beside the floor, and the plans.

Random weights in real shapes, bfloat16, blocks of 32, a cache of random K and V. A step is one forward over a block of
random tokens, so that its tokens go their own ways, head and argmax included; steps run in one jitted loop. The floor
is the bytes a step must read over the measured copy bandwidth: the experts that its tokens actually chose, counted in a
run of their own, every other weight and the cache once.

Also: the grouped kernel against `jax.lax.ragged_dot` for one layer; MAGE's later steps against dense ones; and HERALD's
throughput against the dense plan's under one cap on device memory (`benchmarks.moe_herald`). In these blocks are masks
at first, which are routed apart by what they attend to (`benchmarks.block_times.contrast`).

The parts can be run apart, each with an `--out` of its own; `--merge FILES` joins what they wrote. HERALD's is always a
process of its own, for which the cap holds. `--side-by-side` runs each part in a process: they compile at the same time
and measure one after the other (`benchmarks.turns`).
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks import common, moe_herald, moe_steps
from benchmarks.block_times import lower_ahead, measure
from benchmarks.mage import bytes_needed
from benchmarks.moe_steps import Steps, Touched, step_bytes
from benchmarks.shapes import SHAPES
from benchmarks.turns import Turns, run_side_by_side
from herald_jax import Dense, Mage, ModelConfig
from herald_jax.model import Params, init_params

GOALS = {
    "step/llada2_mini/4k/b1/over_floor": "<=1.6",
    "step/sdar_30b_a3b/4k/b1/over_floor": "<=1.6",
    "mage/llada2_mini/64k/step_speedup": ">=1.5",
    "herald/llada2_mini/64k/throughput": ">=2",
}
PARTS = ("steps", "mage", "herald")


def parameters(config: ModelConfig) -> Params:
    """Random weights; embeddings of unit variance, so that tokens differ enough to be routed apart."""
    params = init_params(config, jax.random.key(0))
    table = params["embed"]["embedding"]
    params["embed"]["embedding"] = jax.jit(lambda x: x * (1 / 0.02), donate_argnums=0)(table)
    return params


class Run:
    """Rows of the parts of one process. A part is a shape's `steps`, or `mage` or `herald` on one."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.turns = options, Turns(options.turns)
        self.rows: list[dict[str, Any]] = []
        self.loaded, self.params = "", {}

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(row, flush=True)
        common.write_results("moe", self.rows, folder=self.options.out)  # a run that is cut short keeps what it has

    def part(self, part: str, name: str) -> None:
        common.stage(f"{name} {part}: begins")
        getattr(self, part)(name)
        common.stage(f"{name} {part}: done")

    def _load(self, name: str, nbytes: float) -> Params:
        """The weights, when this process may measure; `nbytes` is what all of the part holds."""
        self.turns.begin_measuring(nbytes)
        if self.loaded != name:
            self.params = {}  # free the last model before the next is made
            self.params, self.loaded = jax.block_until_ready(parameters(SHAPES[name])), name
            common.stage(f"{name}: weights made")
        return self.params

    def steps(self, name: str) -> None:
        config = SHAPES[name]
        batches = [int(batch) for batch in self.options.batches.split(",")]
        contexts = [1024 * int(thousands) for thousands in self.options.contexts.split(",")]
        with self.turns.compiling(), ThreadPoolExecutor(8) as pool:
            counter = Touched(config, max(batches), min(contexts), pool)
            programs = {batch: Steps(name, batch, max(contexts), self.options.steps, pool) for batch in batches}
            common.stage(f"{name} steps: lowered")
            counter.wait()
            for program in programs.values():
                program.wait()
            common.stage(f"{name} steps: compiled")
        params = self._load(name, moe_steps.bytes_needed(config, max(batches), max(contexts)))
        bandwidth = common.copy_bandwidth()
        # At one context: how many experts the tokens of a block choose hardly depends on what they attend to.
        touched = counter.count(params, min(contexts), batches)
        common.stage(f"{name}: experts touched {touched}")
        for batch, program in programs.items():
            self.add(program.expert_row(params))
            for context, seconds in program.seconds(params, contexts).items():
                floor = step_bytes(config, touched[batch], batch, context) / bandwidth
                id = f"step/{name}/{context // 1024}k/b{batch}/over_floor"
                detail = {"step_ms": seconds * 1e3, "floor_ms": floor * 1e3, "touched_experts": touched[batch]}
                self.add(common.row(id, seconds / floor, "x", goal=GOALS.get(id), detail=detail))
            common.stage(f"{name}: {batch} rows measured")

    def mage(self, name: str) -> None:
        config, context, batch = SHAPES[name], 1024 * self.options.plan_context, self.options.plan_rows
        plans = (Dense(), Mage())
        with self.turns.compiling(), ThreadPoolExecutor(3) as pool:
            counter = Touched(config, batch, context, pool, masked=True)
            compiling = [pool.submit(lower_ahead(config, batch, context, plan).compile) for plan in plans]
            common.stage(f"{name} mage: lowered")
            programs = [program.result() for program in compiling]
            counter.wait()
            common.stage(f"{name} mage: compiled")
        params = self._load(name, bytes_needed(config, batch, context, Mage()))
        bandwidth = common.copy_bandwidth()
        touched = counter.count(params, context, [batch])[batch]
        common.stage(f"{name}: experts touched by masks {touched:.1f}")
        dense, sparse = (
            measure(config, params, batch, context, plan, program)
            for plan, program in zip(plans, programs, strict=True)
        )
        id = f"mage/{name}/{self.options.plan_context}k/step_speedup"
        detail = {
            "batch": batch,
            "dense_step_ms": dense.later * 1e3,
            "sparse_step_ms": sparse.later * 1e3,
            "touched_experts": touched,
            "dense_floor_ms": step_bytes(config, touched, batch, context) / bandwidth * 1e3,
            "sparse_floor_ms": step_bytes(config, touched, batch, Mage().entries(context)) / bandwidth * 1e3,
        }
        self.add(common.row(id, dense.later / sparse.later, "x", goal=GOALS.get(id), detail=detail))

    def herald(self, name: str) -> None:
        context, rows, cap = 1024 * self.options.plan_context, self.options.herald_rows, self.options.cap * 1e9
        with self.turns.compiling(), ThreadPoolExecutor(2) as pool:
            throughput = moe_herald.Throughput(name, rows, context, cap, pool)
            throughput.wait()
            common.stage(f"{name} herald: dense program compiled")
        memory = jax.devices()[0].memory_stats() or {}
        params = self._load(name, max(memory.get("bytes_limit", 0) - memory.get("pool_bytes", 0) - 2**26, 0))
        goal = GOALS.get(f"herald/{name}/{self.options.plan_context}k/throughput")
        throughput.measure(params, self.options.selectors.split(","), self.add, goal)


def side_by_side(options: argparse.Namespace, parts: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Every part in a process of its own."""
    # This process only names the machine in the results file.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    shared = [
        "--batches", options.batches, "--contexts", options.contexts, "--steps", str(options.steps),
        "--plan-context", str(options.plan_context), "--plan-rows", str(options.plan_rows),
        "--herald-rows", str(options.herald_rows), "--cap", str(options.cap), "--selectors", options.selectors,
    ]  # fmt: skip
    arguments = [[*shared, "--shapes", name, "--plans", name, "--parts", part] for part, name in parts]

    def save(rows: list[dict[str, Any]]) -> None:
        if rows:
            common.write_results("moe", rows, folder=options.out)

    return run_side_by_side("benchmarks.moe", arguments, save)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default="llada2_mini,sdar_30b_a3b")
    parser.add_argument("--parts", default=",".join(PARTS), help="of these; comma-separated")
    parser.add_argument("--batches", default="1,4,16", help="of the step rows")
    parser.add_argument("--contexts", default="4,32", help="of the step rows, in units of 1024 tokens")
    parser.add_argument("--steps", type=int, default=32, help="per timed loop")
    parser.add_argument("--plans", default="llada2_mini", help="shape of the MAGE and HERALD rows; empty: none")
    parser.add_argument("--plan-context", type=int, default=64, help="of the plans' rows, in units of 1024 tokens")
    parser.add_argument("--plan-rows", type=int, default=16, help="batch of the MAGE row")
    parser.add_argument("--herald-rows", type=int, default=16, help="batch under HERALD")
    parser.add_argument("--selectors", default="index,cpu", help="of HERALD; comma-separated")
    parser.add_argument("--cap", type=float, default=48, help="device memory of HERALD's part in GB")
    parser.add_argument("--side-by-side", action="store_true", help="compile the parts in a process each, all at once")
    parser.add_argument("--turns", type=Path, default=None, help=argparse.SUPPRESS)
    common.merge_option(parser)
    common.output_option(parser)
    options = parser.parse_args()
    if options.merge:
        common.print_rows(common.merge_results("moe", options.merge, folder=options.out))
        return

    wanted = options.parts.split(",")
    if unknown := sorted(set(wanted) - set(PARTS)):
        raise SystemExit(f"error: --parts knows {', '.join(PARTS)}, but not {', '.join(unknown)}")
    parts = [
        (part, name)
        for name in options.shapes.split(",")
        for part in PARTS
        if part in wanted and (part == "steps" or name == options.plans)
    ]
    if options.side_by_side:
        common.print_rows(side_by_side(options, parts))
        return
    # Before JAX's first use.
    if ("herald", options.plans) in parts:
        if len(parts) > 1:
            raise SystemExit(
                "error: HERALD's part caps the device memory of its process: run the others apart, or --side-by-side"
            )
        moe_herald.prepare(options.plans, options.herald_rows, 1024 * options.plan_context, 1e9 * options.cap)
    elif "XLA_CLIENT_MEM_FRACTION" not in os.environ:
        # 16 rows of 64K need more than the three quarters of the card that JAX takes by default.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    run = Run(options)
    for part, name in parts:
        run.part(part, name)
    if options.turns is None:
        common.print_rows(run.rows)


if __name__ == "__main__":
    main()
