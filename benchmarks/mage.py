"""`python -m benchmarks.mage`: time per step and per block of the MAGE plan, beside the dense plan and the floor.

Random weights in real shapes, bfloat16, blocks of 32. The cache is filled with random K and V instead of a prefill: a
step's time does not depend on what the entries say, and a 128K prompt need not be computed for every case. Two runs of
one compiled program separate the steps of a block: with a threshold of 0 a block takes one denoising step (or one a
sub-block), with 1 it takes 32; the difference is later steps, the rest the first one.

The dense program serves all contexts of a case: its cache has room for the longest, and a step takes the time of what
it reads, not of what is allocated. The attention kernel cuts what is visible into as many parts at each of these
lengths, but for one row of Fast-dLLM v2 1.5B at 128K (33, not 32). The sparse programs are compiled for each context:
importance, choice and pool do take the time of their sizes.

All programs of a case are compiled before its arrays are made. With `--side-by-side` each case compiles in a process of
its own, all at once, and they measure one after the other (`benchmarks.turns`).

The floor of a step is the bytes it must read (weights once; the pool, or for a dense step the whole cache, once) over
the measured copy bandwidth, or its matmuls at the measured rate where that takes longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from benchmarks.shapes import SHAPES, step_flops, step_weight_bytes
from benchmarks.turns import Turns, run_side_by_side
from herald_jax import Dense, Mage, ModelConfig, Threshold, select
from herald_jax.block_loop import LoopOptions, Rows, first_canvas, run_blocks
from herald_jax.cache import DeviceKV
from herald_jax.denoise import Sampling, predict
from herald_jax.generate import capacity_for
from herald_jax.mage import MageKV
from herald_jax.model import Params, bind, init_params, param_specs, unflatten
from herald_jax.plans import Plan
from herald_jax.prefill import prefill

CASES = [
    ("sdar8b", 1), ("sdar8b", 4), ("fdv2_7b", 1), ("fdv2_7b", 4), ("sdar1.7b", 1), ("fdv2_1.5b", 1), ("fdv2_1.5b", 8),
]  # fmt: skip
CONTEXTS = (16, 32, 64, 128)
BLOCKS = 2
_GREEDY = Sampling.of(0.0, 0, 1.0)
_NO_STOPS = np.array([-1], np.int32)


@dataclasses.dataclass(frozen=True)
class BlockTime:
    """Seconds of a block's first forward and of each later one."""

    first: float
    later: float

    def block(self, steps: int = 32) -> float:
        """A block of `steps` denoising steps and its commit."""
        return self.first + steps * self.later


def random_cache(config: ModelConfig, batch: int, capacity: int) -> DeviceKV:
    """A cache full of random entries, made layer by layer: no second copy, no float32 one."""
    empty = DeviceKV.empty(config, batch, capacity)
    return DeviceKV(_fill(empty.k, jax.random.key(1)), _fill(empty.v, jax.random.key(2)))


@functools.partial(jax.jit, donate_argnums=0)
def _fill(x: jax.Array, key: jax.Array) -> jax.Array:
    def one(layer: jax.Array, x: jax.Array) -> jax.Array:
        values = jax.random.normal(jax.random.fold_in(key, layer), x.shape[1:], x.dtype)
        return jax.lax.dynamic_update_index_in_dim(x, values, layer, 0)

    return jax.lax.fori_loop(0, x.shape[0], one, x)


def start(
    config: ModelConfig, params: Params, batch: int, context: int, plan: Plan, capacity: int | None = None
) -> tuple[Rows, LoopOptions]:
    """Rows whose prompt of `context` tokens is in the cache already, with room for BLOCKS blocks.

    `capacity`: slots of the cache, by default as many as `generate` would allocate.
    """
    block = config.diffusion.block_length
    end = context + BLOCKS * block
    capacity = capacity or capacity_for(end + block)
    cache: DeviceKV | MageKV = random_cache(config, batch, capacity)
    if isinstance(plan, Mage):
        cache = MageKV.around(cache, plan, config, end, None)
    options = LoopOptions(config, plan=plan)
    full = np.full((batch,), context, np.int32)
    rows = first_canvas(
        params, cache, jnp.zeros((batch, config.hidden_size), jnp.dtype(config.dtype)),
        np.ones((batch, capacity), np.int32), full, full, full + BLOCKS * block, np.zeros((batch,), bool),
        jax.random.split(jax.random.key(0), batch), _NO_STOPS, _GREEDY, options=options,
    )  # fmt: skip
    return rows, options


@functools.partial(jax.jit, static_argnames="seeded", donate_argnames="rows")
def rewind(rows: Rows, context: jax.Array, *, seeded: bool) -> Rows:
    """Rows behind a prompt of `context` (i32 scalar) tokens that wrote nothing; the cache's contents do not matter."""
    batch, block = rows.canvas.shape
    zero, off = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), bool)
    known = jnp.broadcast_to(jnp.arange(block)[None, :] < seeded, rows.known.shape)
    return dataclasses.replace(
        rows, prompt_length=zero + context, limit=zero + context + BLOCKS * block,
        length=zero + context, ready=zero + context, done=off, step=zero, whole_block=off, fresh=off,
        known=known, forwards=zero, commits=zero, blocks=zero, batch_forwards=jnp.zeros((), jnp.int32),
    )  # fmt: skip


def abstract_params(config: ModelConfig) -> Params:
    """Shapes and dtypes of the parameters."""
    specs = param_specs(config)
    return unflatten({path: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for path, spec in specs.items()})


def compile_ahead(config: ModelConfig, batch: int, context: int, plan: Plan) -> Callable[..., Rows]:
    """The program of `measure`, compiled from shapes alone."""
    params = abstract_params(config)
    rows = jax.eval_shape(lambda params: start(config, params, batch, context, plan)[0], params)
    arguments = (params, rows, Threshold(0.5), _GREEDY, _NO_STOPS, np.bool_(False))
    return run_blocks.lower(*arguments, options=LoopOptions(config, plan=plan)).compile()


def split_times(one: float, few: int, many: float, more: int) -> BlockTime:
    """Times of first and later forwards, from BLOCKS blocks in `one` seconds and `few` forwards, and again with `more`.

    A block of a family with sub-blocks takes a step for each of these at the least, so the forwards are counted.
    """
    later = (many - one) / (more - few)
    return BlockTime((one - (few - BLOCKS) * later) / BLOCKS, later)


def measure(
    config: ModelConfig, params: Params, batch: int, context: int, plan: Plan,
    compiled: Callable[..., Rows] | None = None,
) -> BlockTime:  # fmt: skip
    """Time BLOCKS blocks at one step and at 32 steps each; medians of three runs of each."""
    return measure_contexts(config, params, batch, [context], plan, compiled)[context]


def measure_contexts(
    config: ModelConfig, params: Params, batch: int, contexts: Sequence[int], plan: Plan,
    compiled: Callable[..., Rows] | None = None, capacity: int | None = None,
) -> dict[int, BlockTime]:  # fmt: skip
    """`measure` at several contexts, by one program with room for the longest: `compiled`, if it is there already."""
    rows, options = start(config, params, batch, max(contexts), plan, capacity)
    run = compiled or functools.partial(run_blocks, options=options)
    found = {}
    for context in contexts:
        taken: dict[float, list[float]] = {0.0: [], 1.0: []}
        forwards: dict[float, int] = {}
        for threshold in (0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0):
            rows = jax.block_until_ready(rewind(rows, np.int32(context), seeded=config.diffusion.seeded))
            began = time.perf_counter()
            rows = run(params, rows, Threshold(threshold), _GREEDY, _NO_STOPS, np.bool_(False))
            forwards[threshold] = int(rows.batch_forwards)
            taken[threshold].append(time.perf_counter() - began)
        one, many = (float(np.median(times)) for times in (taken[0.0][1:], taken[1.0]))
        found[context] = split_times(one, forwards[0.0], many, forwards[1.0])
    return found


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
        return predict(hidden + carry, model.head_kernel(), _GREEDY).token

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
    """Seconds one forward of a block must take when each row reads `entries` cache entries per layer and head."""
    nbytes = step_weight_bytes(config) + batch * entries * config.kv_bytes_per_token
    rows = batch * config.diffusion.block_length
    attention = 4 * rows * config.num_heads * config.head_dim * config.num_layers * entries
    return max(nbytes / bandwidth, (step_flops(config, rows) + attention) / rate)


def bytes_needed(config: ModelConfig, batch: int, context: int, plan: Mage) -> int:
    """Device memory of a case under MAGE, which needs the most: parameters, cache, pool, and what a step works with."""
    block = config.diffusion.block_length
    end = context + BLOCKS * block
    slots = capacity_for(end + block) + select.selected_capacity(plan, end) + block
    params = sum(math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize for spec in param_specs(config).values())
    logits = 4 * batch * block * config.vocab_size
    return params + batch * slots * config.kv_bytes_per_token + 4 * logits


def fits(config: ModelConfig, batch: int, context: int, plan: Mage, memory: float) -> bool:
    """Whether a case needs at most 97 % of what JAX may use: the rest is for programs and for gaps between arrays."""
    return bytes_needed(config, batch, context, plan) < 0.97 * memory


# Issue 4's goals, by row id.
GOALS = {
    "sparse_step/sdar8b/128k/b4/over_floor": "<=1.25",
    "step_speedup/sdar8b/128k/b4": ">=4",
    "step_speedup/fdv2_1.5b/128k/b8": ">=4",
    "block_speedup/sdar8b/128k/b4": ">=3.5",
}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that speak for several cases: the worst of them."""
    found = []
    for id, like, unit, goal, worst in (
        ("sparse_step/all/worst_over_floor", r"sparse_step/.*/over_floor", "x", "<=1.25", max),
        ("first_step/over_dense", r"first_step/.*/over_dense", "x", "<=1.15", max),
        ("break_even_steps/64k", r"break_even_steps/.*/64k/.*", "steps", "<=2", max),
        ("step_speedup_vs_cudnn/128k", r"step_speedup_vs_cudnn/.*/128k/.*", "x", ">=6.3", min),
    ):  # fmt: skip
        values = [r["value"] for r in rows if re.fullmatch(like, r["id"])]
        if values:
            found.append(common.row(id, worst(values), unit, goal=goal))
    return found


class Run:
    """Rows of the cases of one process."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.turns = options, Turns(options.turns)
        self.rows: list[dict[str, Any]] = []
        self.bandwidth = self.rate = 0.0
        self.loaded, self.params = "", {}

    def add(self, id: str, value: float, detail: dict[str, Any] | None = None, unit: str = "x") -> None:
        self.rows.append(common.row(id, value, unit, goal=GOALS.get(id), detail=detail))

    def save(self) -> None:
        common.write_results("mage", self.rows + summary(self.rows), folder=self.options.out)

    def case(self, name: str, batch: int) -> None:
        """Compiles everything for one shape and batch, then measures it, context by context."""
        config, plan = SHAPES[name], Mage(self.options.budget)
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
        where = f"{name} b{batch}"
        with self.turns.compiling(), ThreadPoolExecutor(3) as threads:
            common.stage(f"{where}: compiling {1 + len(contexts)} programs")
            # While XLA compiles one, Python lowers the next.
            making = {context: threads.submit(compile_ahead, config, batch, context, plan) for context in contexts}
            dense = threads.submit(compile_ahead, config, batch, max(contexts), Dense())
            sparse = {context: made.result() for context, made in making.items()}
            whole = dense.result()
        self.turns.begin_measuring()
        common.stage(f"{where}: measuring")
        self._load(name)
        times = measure_contexts(config, self.params, batch, contexts, Dense(), whole)
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

    def _context(self, name: str, batch: int, context: int, dense: BlockTime, sparse: BlockTime) -> None:
        """The rows of one shape, batch and context."""
        config, plan, thousands = SHAPES[name], Mage(self.options.budget), context // 1024
        pool = select.selected_capacity(plan, context)
        whole = plan.dense_layers * context + (config.num_layers - plan.dense_layers) * min(pool, context)
        floors = [
            floor_of(config, batch, entries, self.bandwidth, self.rate)
            for entries in (context, whole / config.num_layers)
        ]
        where = f"{name}/{thousands}k/b{batch}"
        detail = {
            "dense_step_ms": dense.later * 1e3, "dense_first_ms": dense.first * 1e3,
            "sparse_step_ms": sparse.later * 1e3, "sparse_first_ms": sparse.first * 1e3,
            "dense_floor_ms": floors[0] * 1e3, "sparse_floor_ms": floors[1] * 1e3,
        }  # fmt: skip
        self.add(f"sparse_step/{where}/over_floor", sparse.later / floors[1], detail)
        self.add(f"step_speedup/{where}", dense.later / sparse.later, detail)
        self.add(f"block_speedup/{where}", dense.block() / sparse.block(), detail)
        self.add(f"first_step/{where}/over_dense", sparse.first / dense.later, detail)
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
            ["--cases", case, "--contexts", options.contexts, "--budget", str(options.budget), "--cudnn",
             options.cudnn, "--prefill", str(own)]
        )  # fmt: skip

    def cases_only(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The summaries of the processes give way to one of all."""
        summaries = {row["id"] for row in summary(rows)}
        found = [row for row in rows if row["id"] not in summaries]
        return found + summary(found)

    def save(rows: list[dict[str, Any]]) -> None:
        if rows:
            common.write_results("mage", cases_only(rows), folder=options.out)

    return cases_only(run_side_by_side("benchmarks.mage", arguments, save))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(f"{n}:{b}" for n, b in CASES), help="shape:batch, comma-separated")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="in units of 1024 tokens")
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument("--cudnn", default="sdar8b:4:128", help="shape:batch:context cases to run on cudnn too")
    parser.add_argument("--prefill", type=int, default=32, help="prompt of the prefill row, in units of 1024 tokens")
    parser.add_argument("--side-by-side", action="store_true", help="compile the cases in a process each, all at once")
    parser.add_argument("--turns", type=Path, default=None, help=argparse.SUPPRESS)
    common.output_option(parser)
    options = parser.parse_args()

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
