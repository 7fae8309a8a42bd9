"""`python -m benchmarks.mage`: time per step and per block of the MAGE plan, beside the dense plan and the floor.

Random weights in real shapes, bfloat16, blocks of 32; `benchmarks.block_times` says how a first step is told from later
ones and from the call.

The dense program serves all contexts of a case: its cache has room for the longest, and a step takes the time of what
it reads, not of what is allocated. The attention kernel cuts what is visible into as many parts at each of these
lengths, but for one row of Fast-dLLM v2 1.5B at 128K (33, not 32). The sparse programs are compiled for each context:
importance, choice and pool do take the time of their sizes.

All programs of a case are compiled before its arrays are made. With `--side-by-side` each case compiles in a process of
its own, all at once, and they measure one after the other (`benchmarks.turns`). On several GPUs run some of the cases
on each, with an `--out` of its own; `--merge FILES` joins what they wrote.

The floor of a step is the bytes it must read (weights once; the pool, or for a dense step the whole cache, once) over
the measured copy bandwidth, or its matmuls at the measured rate where that takes longer.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from benchmarks.block_times import BLOCKS, GREEDY, BlockTime, compile_ahead, measure, measure_contexts
from benchmarks.shapes import SHAPES, step_flops, step_weight_bytes
from benchmarks.turns import Turns, run_side_by_side
from herald_jax import Dense, Mage, ModelConfig, select
from herald_jax.cache import DeviceKV
from herald_jax.denoise import predict
from herald_jax.generate import capacity_for
from herald_jax.model import Params, bind, init_params, param_specs
from herald_jax.prefill import prefill

CASES = [
    ("sdar8b", 4), ("sdar8b", 1), ("sdar8b", 8), ("sdar1.7b", 1), ("sdar1.7b", 4), ("sdar1.7b", 8),
    ("fdv2_1.5b", 8), ("fdv2_1.5b", 1), ("fdv2_1.5b", 4), ("fdv2_7b", 1), ("fdv2_7b", 4), ("fdv2_7b", 8),
]  # fmt: skip
CONTEXTS = (16, 32, 64, 128)


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def _cudnn_steps(config: ModelConfig, params: Params, kv: Any, length: jax.Array, *, steps: int) -> jax.Array:
    """`steps` dense steps as a JAX user writes them today: token-major cache, cudnn attention, folded groups."""
    model, block = bind(config, params), config.diffusion.block_length

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        b, t, heads, group, d = q.shape
        keys, values = kv[layer]
        folded = jnp.moveaxis(q, 3, 2).reshape(b, t * group, heads, d)
        out = jax.nn.dot_product_attention(folded, keys, values, key_value_seq_lengths=length, implementation="cudnn")
        return jnp.moveaxis(out.reshape(b, t, group, heads, d), 2, 3), cache + jnp.sum(k) * 0 + jnp.sum(v) * 0

    def body(_: Any, tokens: jax.Array) -> jax.Array:
        positions = length[:, None] - block + jnp.arange(block)[None, :]
        hidden, carry = model(tokens, positions, attend, jnp.zeros((), jnp.dtype(config.dtype)))
        return predict(hidden + carry, model.head_kernel(), GREEDY).token

    return jax.lax.fori_loop(0, steps, body, jnp.zeros((length.shape[0], block), jnp.int32))


def measure_cudnn(config: ModelConfig, params: Params, batch: int, context: int) -> float:
    """Seconds per dense step on cudnn, or NaN where cudnn is not there."""
    if jax.default_backend() != "gpu":
        return float("nan")
    shape = (batch, context + config.diffusion.block_length, config.num_kv_heads, config.head_dim)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.dtype(config.dtype)))
    keys = jax.random.split(jax.random.key(3), 2 * config.num_layers)
    kv = tuple((make(keys[2 * i]), make(keys[2 * i + 1])) for i in range(config.num_layers))
    length = jnp.full((batch,), shape[1], jnp.int32)
    run = functools.partial(_cudnn_steps, config, params, kv, length, steps=8)
    return common.wall_time(run, [()], repeats=3) / 8


def measure_prefill(config: ModelConfig, params: Params, length: int) -> float:
    """Seconds to prefill one prompt of `length` tokens."""
    tokens = np.random.default_rng(0).integers(0, 150_000, (1, length)).astype(np.int32)
    seconds = []
    for _ in range(3):
        cache = jax.block_until_ready(DeviceKV.empty(config, 1, capacity_for(length)))
        began = time.perf_counter()
        done = prefill(params, cache, tokens, np.array([length]), config=config, chunk=min(4096, length))
        jax.block_until_ready(done)
        seconds.append(time.perf_counter() - began)
        del cache, done
    return float(np.median(seconds[1:]))


def matmul_rate() -> float:
    """FLOP/s of a large bfloat16 matmul on random data."""
    x = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    taken = common.device_time(jax.jit(jnp.matmul), [(x, x)], repeats=10)
    return 2 * 8192**3 / taken.seconds


def floor_of(config: ModelConfig, batch: int, entries: float, bandwidth: float, rate: float) -> float:
    """Seconds one forward of a block must take when each row reads `entries` cache entries per layer and head.

    Of a family with sub-blocks a step reveals tokens of one: the head has to run over no more.
    """
    nbytes = step_weight_bytes(config) + batch * entries * config.kv_bytes_per_token
    rows = batch * config.diffusion.block_length
    attention = 4 * rows * config.num_heads * config.head_dim * config.num_layers * entries
    flops = step_flops(config, rows, batch * config.diffusion.small_block_length) + attention
    return max(nbytes / bandwidth, flops / rate)


def bytes_needed(config: ModelConfig, batch: int, context: int, plan: Mage) -> int:
    """Device memory of a case under MAGE, which needs the most: parameters, cache, pool, and what a step works with."""
    block = config.diffusion.block_length
    end = context + BLOCKS * block
    slots = capacity_for(end + block) + select.selected_capacity(plan, end) + block
    params = sum(math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize for spec in param_specs(config).values())
    heads, layers = config.num_kv_heads, config.num_layers - plan.dense_layers
    scores = 4 * batch * heads * capacity_for(end + block) * layers // select.scored_page(plan)
    of_block = batch * block * config.num_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    # What a selection leaves out is kept as two arrays like the queries of all layers, and made from others like them.
    # Choosing from the scores of all layers takes twice as much again as they do.
    return params + batch * slots * config.kv_bytes_per_token + 3 * scores + 6 * config.num_layers * of_block


def fits(config: ModelConfig, batch: int, context: int, plan: Mage, memory: float) -> bool:
    """Whether a case needs at most 97 % of what JAX may use: the rest is for programs and for gaps between arrays."""
    return bytes_needed(config, batch, context, plan) < 0.97 * memory


# Issue 4's goals, by row id.
GOALS = {
    "dense_step/sdar8b/4k/b1/over_floor": "<=1.25",
    "sparse_step/sdar8b/128k/b4/over_floor": "<=1.25",
    "step_speedup/sdar8b/128k/b4": ">=4",
    "step_speedup/fdv2_1.5b/128k/b8": ">=4",
    "block_speedup/sdar8b/128k/b4": ">=3.5",
}


def first_over_dense(dense: BlockTime, sparse: BlockTime) -> tuple[float, float]:
    """A selecting first step over a dense step, and the standard error of that."""
    ratio = sparse.first / dense.later
    return ratio, ratio * math.hypot(sparse.first_error / sparse.first, dense.later_error / dense.later)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that speak for several cases of the plan as it is by default: the worst of them.

    Each names that case, and says where it is from if it was kept from an earlier run.
    """
    found = []
    for id, like, unit, goal, worst in (
        ("sparse_step/all/worst_over_floor", r"sparse_step/[^/]*/[^/]*/[^/]*/over_floor", "x", "<=1.25", max),
        ("first_step/over_dense", r"first_step/[^/]*/[^/]*/[^/]*/over_dense", "x", "<=1.15", max),
        ("break_even_steps/64k", r"break_even_steps/[^/]*/64k/[^/]*", "steps", "<=2", max),
        ("step_speedup_vs_cudnn/128k", r"step_speedup_vs_cudnn/[^/]*/128k/[^/]*", "x", ">=6.3", min),
    ):  # fmt: skip
        cases = [r for r in rows if re.fullmatch(like, r["id"])]
        if not cases:
            continue
        of = worst(cases, key=lambda r: r["value"])
        detail = {"case": of["id"], "cases": len(cases)}
        if "error" in of.get("detail", {}):
            detail["error"] = of["detail"]["error"]
        if older := sorted({(r["commit"], "/".join(r["id"].split("/")[1:4])) for r in cases if "commit" in r}):
            detail["of_other_commits"] = [f"{case} ({commit})" for commit, case in older]
        origin = {key: of[key] for key in ("commit", "date", "command") if key in of}
        found.append(common.row(id, of["value"], unit, goal=goal, detail=detail) | origin)
    return found


def with_summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of cases, and one summary of all instead of those of the processes that measured them."""
    summaries = {row["id"] for row in summary(rows)}
    found = [row for row in rows if row["id"] not in summaries]
    return found + summary(found)


def plan_of(budget: float, fields: str) -> Mage:
    """The MAGE plan with this budget and fields like "query=center,rest=drop", whatever their types."""
    pairs = (field.split("=") for field in fields.split(",") if field)
    return Mage(budget, **{name: int(value) if value.isdecimal() else value for name, value in pairs})


class Run:
    """Rows of the cases of one process."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.turns = options, Turns(options.turns)
        self.plan = plan_of(options.budget, options.plan)
        self.rows: list[dict[str, Any]] = []
        self.bandwidth = self.rate = 0.0
        self.loaded, self.params = "", {}

    def add(self, id: str, value: float, detail: dict[str, Any] | None = None, unit: str = "x") -> None:
        self.rows.append(common.row(id, value, unit, goal=GOALS.get(id), detail=detail))

    def save(self) -> None:
        common.write_results("mage", self.rows + summary(self.rows), folder=self.options.out)

    def case(self, name: str, batch: int) -> None:
        """Compiles everything for one shape and batch, then measures it, context by context."""
        config, plan = SHAPES[name], self.plan
        memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 16e9)
        contexts = []
        for thousands in map(int, self.options.contexts.split(",")):
            context = thousands * 1024
            if fits(config, batch, context, plan, memory):
                contexts.append(context)
            else:
                sizes = f"needs {bytes_needed(config, batch, context, plan) / 1e9:.0f} GB of {memory / 1e9:.0f} GB"
                print(f"{name} b{batch} {thousands}k does not fit: {sizes}", flush=True)
        if not contexts:
            return
        cases = [case.split(":") for case in self.options.dense.split(",") if case]
        short = [1024 * int(thousands) for shape, rows, thousands in cases if (shape, int(rows)) == (name, batch)]
        short = [context for context in short if context not in contexts]
        where = f"{name} b{batch}"
        with self.turns.compiling(), ThreadPoolExecutor(3) as threads:
            common.stage(f"{where}: compiling {1 + len(contexts) + len(short)} programs")
            # While XLA compiles one, Python lowers the next.
            making = {context: threads.submit(compile_ahead, config, batch, context, plan) for context in contexts}
            dense = {
                context: threads.submit(compile_ahead, config, batch, context, Dense())
                for context in (*short, max(contexts))
            }
            sparse, whole = ({at: made.result() for at, made in some.items()} for some in (making, dense))
        common.stage(f"{where}: compiled")
        self.turns.begin_measuring(max(bytes_needed(config, batch, context, plan) for context in contexts))
        common.stage(f"{where}: measuring")
        self._load(name)
        for context in short:
            self._dense(name, batch, context, measure(config, self.params, batch, context, Dense(), whole[context]))
        times = measure_contexts(config, self.params, batch, contexts, Dense(), whole[max(contexts)])
        common.stage(f"{where}: dense plan measured")
        for context in contexts:
            taken = measure(config, self.params, batch, context, plan, sparse[context])
            self._context(name, batch, context, times[context], taken)
            self.save()  # after every case: a run that is cut short keeps what it has
            common.stage(f"{where}: {context // 1024}k measured")

    def _load(self, name: str) -> None:
        """Random weights of that shape, the machine's rates, and the prefill row where it is wanted."""
        if not self.bandwidth:
            self.bandwidth, self.rate = common.copy_bandwidth(), matmul_rate()
            print(f"copy {self.bandwidth / 1e12:.2f} TB/s, matmul {self.rate / 1e12:.0f} TFLOP/s", flush=True)
        if self.loaded == name:
            return
        config = SHAPES[name]
        self.params = {}  # free the last model before the next is made
        self.params, self.loaded = init_params(config, jax.random.key(0)), name
        if name == "sdar8b" and self.options.prefill:
            length = self.options.prefill * 1024
            seconds = measure_prefill(config, self.params, length)
            attention = 4 * config.num_heads * config.head_dim * config.num_layers * length**2 / 2
            flops = step_flops(config, length) - 2 * length * config.vocab_size * config.hidden_size + attention
            detail = {"seconds": seconds, "flops": flops, "matmul_rate": self.rate}
            id = f"prefill/{name}/{self.options.prefill}k/mfu"
            self.rows.append(common.row(id, flops / seconds / self.rate, "", goal=">=0.45", detail=detail))
            print(id, self.rows[-1]["value"], detail, flush=True)

    def _dense(self, name: str, batch: int, context: int, dense: BlockTime) -> None:
        """The row of a dense step."""
        floor = floor_of(SHAPES[name], batch, context, self.bandwidth, self.rate)
        detail = {"step_ms": dense.later * 1e3, "floor_ms": floor * 1e3}
        id = f"dense_step/{name}/{context // 1024}k/b{batch}/over_floor"
        self.add(id, dense.later / floor, detail)
        print(id, self.rows[-1]["value"], detail, flush=True)

    def _context(self, name: str, batch: int, context: int, dense: BlockTime, sparse: BlockTime) -> None:
        """The rows of one shape, batch and context."""
        if not self.options.plan:
            self._dense(name, batch, context, dense)
        config, plan, thousands = SHAPES[name], self.plan, context // 1024
        pool = select.selected_capacity(plan, context)
        whole = plan.dense_layers * context + (config.num_layers - plan.dense_layers) * min(pool, context)
        floors = [
            floor_of(config, batch, entries, self.bandwidth, self.rate)
            for entries in (context, whole / config.num_layers)
        ]
        where = f"{name}/{thousands}k/b{batch}" + (f"/{self.options.plan}" if self.options.plan else "")
        detail = {
            "dense_step_ms": dense.later * 1e3, "dense_first_ms": dense.first * 1e3,
            "sparse_step_ms": sparse.later * 1e3, "sparse_first_ms": sparse.first * 1e3,
            "dense_first_error_ms": dense.first_error * 1e3, "sparse_first_error_ms": sparse.first_error * 1e3,
            "dense_call_ms": dense.call * 1e3, "sparse_call_ms": sparse.call * 1e3,
            "dense_floor_ms": floors[0] * 1e3, "sparse_floor_ms": floors[1] * 1e3,
            "dense_layers": plan.dense_layers, "page": plan.page,
        }  # fmt: skip
        self.add(f"sparse_step/{where}/over_floor", sparse.later / floors[1], detail)
        self.add(f"step_speedup/{where}", dense.later / sparse.later, detail)
        self.add(f"block_speedup/{where}", dense.block() / sparse.block(), detail)
        ratio, error = first_over_dense(dense, sparse)
        self.add(f"first_step/{where}/over_dense", ratio, {"error": error, **detail})
        if f"{name}:{batch}:{thousands}" in self.options.cudnn.split(","):
            cudnn = measure_cudnn(config, self.params, batch, context)
            self.add(f"step_speedup_vs_cudnn/{where}", cudnn / sparse.later, {"cudnn_step_ms": cudnn * 1e3})
        if thousands == 64:
            gain = dense.later - sparse.later
            steps = (sparse.first - dense.first) / gain if gain > 0 else float("inf")
            self.add(f"break_even_steps/{where}", steps, detail, "steps")
        print(where, {**detail, "step_speedup": dense.later / sparse.later}, flush=True)


def side_by_side(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case in a process of its own; the rows of all."""
    # This process only names the machine in the results file.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    arguments, prefill = [], options.prefill
    for case in options.cases.split(","):
        own = prefill if case.startswith("sdar8b:") else 0
        prefill -= own  # one process measures it
        arguments.append(
            ["--cases", case, "--contexts", options.contexts, "--budget", str(options.budget), "--plan", options.plan,
             "--cudnn", options.cudnn, "--dense", options.dense, "--prefill", str(own)]
        )  # fmt: skip

    def save(rows: list[dict[str, Any]]) -> None:
        if rows:
            common.write_results("mage", with_summary(rows), folder=options.out)

    return with_summary(run_side_by_side("benchmarks.mage", arguments, save))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(f"{n}:{b}" for n, b in CASES), help="shape:batch, comma-separated")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="in units of 1024 tokens")
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument(
        "--plan", default="", help="other fields of the plan, like query=center,rest=drop; ids end in it"
    )
    parser.add_argument("--cudnn", default="sdar8b:4:128", help="shape:batch:context cases to run on cudnn too")
    parser.add_argument("--dense", default="sdar8b:1:4", help="likewise, cases of the dense plan alone")
    parser.add_argument("--prefill", type=int, default=32, help="prompt of the prefill row, in units of 1024 tokens")
    parser.add_argument("--side-by-side", action="store_true", help="compile the cases in a process each, all at once")
    parser.add_argument("--turns", type=Path, default=None, help=argparse.SUPPRESS)
    common.merge_option(parser)
    common.output_option(parser)
    options = parser.parse_args()
    if options.merge:
        common.print_rows(common.merge_results("mage", options.merge, with_summary, folder=options.out))
        return

    # Before JAX's first use: of the three quarters that JAX takes by default, 4 rows of 128K of an 8B need more.
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    if options.side_by_side:
        common.print_rows(side_by_side(options))
        return
    run = Run(options)
    for name, batch in (case.split(":") for case in options.cases.split(",")):
        run.case(name, int(batch))
    if options.turns is None:
        common.print_rows(run.rows + summary(run.rows))


if __name__ == "__main__":
    main()
