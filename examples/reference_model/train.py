"""Train the reference model for a number of minutes: `python -m examples.reference_model.train --minutes 8 --out DIR`.

Reads the corpus that `examples.reference_model.corpus` wrote. Contexts grow by what the model has learned: a longer
level begins when the answers of the present one are mostly right. The directory gets the model in pieces
(`model.tar.NN`, every two minutes and at the end), `log.jsonl` (losses, tokens per second, accuracy by length and by
task), and `curve.png`.
`--resume DIR` goes on from such a directory, with fresh optimiser moments.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from examples.reference_model import export, rows, tokenizer
from examples.reference_model.curriculum import Curriculum, Programs
from herald_jax import model, sharding, training
from herald_jax.config import ModelConfig
from herald_jax.objective import corrupt, noisy_hidden, token_loss
from herald_jax.train_attention import TrainAttend, masked_attention

# Weight of a token's loss by its kind: context, answer, filling behind an answer, running text.
WEIGHTS = (0.0, 1.0, 0.1, 0.3)
SAVE_SECONDS, LOG_SECONDS = 120.0, 20.0
# A run that has not learned to retrieve at all by then will not do so in the minutes that are left.
GIVE_UP_SECONDS = 200.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Sizes and rates. The defaults are the reference model's."""

    vocab_size: int = 6144
    hidden: int = 384
    mlp: int = 896
    layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    context: int = 16384
    shapes: tuple[rows.Shape, ...] = (rows.Shape(1024, 64, 12), rows.Shape(4096, 16, 36), rows.Shape(8192, 8, 72))
    optimizer: training.Optimizer = dataclasses.field(
        default_factory=lambda: training.Optimizer("muon", weight_decay=0.02)
    )
    rate: float = 3e-3
    warmup: int = 150
    advance_at: float = 0.7
    sentences: int | None = None
    dtype: str = "bfloat16"


# Seconds on two CPU cores: to see that everything fits together.
TINY = Recipe(
    vocab_size=2048, hidden=32, mlp=32, layers=2, heads=2, kv_heads=1, head_dim=16,
    shapes=(rows.Shape(256, 2, 3),), warmup=2, sentences=600, dtype="float32",
)  # fmt: skip


def loss_and_figures(
    config: ModelConfig, attention: str | None, packed: dict[str, jax.Array], key: jax.Array, trained: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The weighted cross-entropy, and counts i32[levels, tasks, 3]: wholly masked answer blocks, those predicted
    entirely right in one forward; and f32[2]: weighted loss of answers and of running text."""
    block = rows.BLOCK
    b, n = packed["tokens"].shape
    kind = packed["kind"].astype(jnp.int32)
    positions = (packed["start"][:, :, None] + jnp.arange(block)[None, None, :]).reshape(b, n)
    answering = packed["task"] != rows.TEXT
    batch = corrupt(
        key, packed["tokens"].astype(jnp.int32), config.diffusion, maskable=kind > 0, at=packed["at"],
        positions=positions, first=packed["first"], complementary=False,
        full=jnp.where(answering, 0.5, 0.0)[:, :, None],
    )  # fmt: skip
    kinds = jnp.take_along_axis(kind.reshape(b, -1, block), batch.at[:, :, None], axis=1)
    batch = dataclasses.replace(batch, weight=jnp.asarray(WEIGHTS, jnp.float32)[kinds])
    params = jax.tree.map(lambda x: x.astype(jnp.dtype(config.dtype)), trained)
    attend = TrainAttend(batch.first, batch.at, batch.masked, implementation=attention)
    hidden, _ = noisy_hidden(config, params, batch, attend)
    found = token_loss(config, params["embed"]["embedding"], hidden, batch)

    answer = kinds == rows.ANSWER
    asked = answering & jnp.any(answer, axis=-1) & jnp.all(batch.masked | ~answer, axis=-1)
    right = asked & jnp.all(found.hit | ~answer, axis=-1)
    levels = jax.nn.one_hot(packed["level"], len(rows.LEVELS), dtype=jnp.float32)
    names = jax.nn.one_hot(packed["task"], len(rows.NAMES), dtype=jnp.float32)
    both = jnp.stack([asked, right], axis=-1).astype(jnp.float32)
    counts = jnp.einsum("bsl,bst,bsc->ltc", levels, names, both, precision="highest")
    split = [jnp.sum(found.nll * found.weight * (kinds == k)) / jnp.maximum(jnp.sum(found.weight * (kinds == k)), 1e-6)
             for k in (rows.ANSWER, rows.RUNNING)]  # fmt: skip
    return found.mean(), {"counts": counts, "answers": split[0], "text": split[1]}


def make_step(config: ModelConfig, recipe: Recipe, attention: str | None, seed: int) -> Any:
    """`step(state, packed, rate)`, jitted, with the state donated."""

    def advance(state: training.TrainState, packed: dict[str, jax.Array], rate: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        loss = functools.partial(loss_and_figures, config, attention)
        return training.make_step(lambda trained, batch: loss(batch, key, trained), recipe.optimizer)(
            state, packed, rate
        )

    return jax.jit(advance, donate_argnums=0)


def initial_params(config: ModelConfig, seed: int) -> Any:
    """Normal weights of deviation 0.02, less on what adds to the residual; q and k norms above 1.

    With normalised q and k of 64 dimensions a logit cannot exceed 8 times the two scales, and a needle among thousands
    of entries needs about 10: from 1.3 it is in reach at once.
    """
    leaves = model.flatten(model.init_params(dataclasses.replace(config, dtype="float32"), jax.random.key(seed)))
    for path, leaf in leaves.items():
        if path.endswith(("out/kernel", "down/kernel")):
            leaves[path] = leaf * (2 * config.num_layers) ** -0.5
        elif path.endswith(("q_norm/scale", "k_norm/scale")):
            leaves[path] = leaf * 1.3
    return model.unflatten(leaves)


def pick_attention(config: ModelConfig) -> str | None:
    """ "cudnn" if it runs here, agrees with the plain form and is faster on a chunk of a 4K context; else None."""
    if jax.default_backend() != "gpu":
        return None
    k1, k2, k3, k4 = jax.random.split(jax.random.key(0), 4)
    shape = (8, 1024, config.num_kv_heads, config.group_size, config.head_dim)
    q = jax.random.normal(k1, shape, jnp.bfloat16)
    k, v = (jax.random.normal(key, (8, 4096, *shape[2:3], shape[4]), jnp.bfloat16) for key in (k2, k3))
    mask = (jnp.arange(4096)[None, :] // 32 <= 96 + jnp.arange(1024)[:, None] // 32)[None, None]
    probe = jax.random.normal(k4, shape, jnp.float32)
    results: dict[str, tuple[float, Any]] = {}
    for name in ("xla", "cudnn"):

        @jax.jit
        @jax.grad
        def gradient(q: jax.Array, name: str = name) -> jax.Array:
            return jnp.sum(masked_attention(q, k, v, mask, name).astype(jnp.float32) * probe)

        try:
            found = jax.block_until_ready(gradient(q))
        except (RuntimeError, ValueError) as refused:  # cuDNN missing, too old, or unwilling
            print(f"attention {name}: {str(refused)[:200]}", flush=True)
            continue
        started = time.perf_counter()
        for _ in range(10):
            found = gradient(q)
        jax.block_until_ready(found)
        results[name] = (time.perf_counter() - started) / 10, found.astype(jnp.float32)
    plain = results["xla"][1]
    if "cudnn" not in results:
        return None
    error = float(jnp.linalg.norm(results["cudnn"][1] - plain) / jnp.linalg.norm(plain))
    print(f"attention: { ({n: f'{1e3 * t:.2f} ms' for n, (t, _) in results.items()}) }, error {error:.1e}", flush=True)
    return "cudnn" if error < 0.02 and results["cudnn"][0] < 0.9 * results["xla"][0] else None


def abstract_rows(mesh: Any, shape: rows.Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and places of `rows.PackedRows`' arrays."""
    b, n, s, m = shape.batch, shape.length, shape.copies, shape.length // rows.BLOCK
    sizes = {"tokens": (n, np.uint16), "kind": (n, np.uint8), "first": (m, np.int32), "start": (m, np.int32)}
    sizes |= dict.fromkeys(("at", "level", "task"), (s, np.int32))
    place = sharding.batch_sharding(mesh, 2) if mesh is not None else sharding.one_device()
    return {k: jax.ShapeDtypeStruct((b, size), dtype, sharding=place) for k, (size, dtype) in sizes.items()}


def run(args: argparse.Namespace, recipe: Recipe) -> None:
    started = time.perf_counter()
    seconds = args.minutes * 60
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="reference-model-"))
    level, earlier = args.level, 0
    resumed = None
    if args.resume is not None:
        resumed = export.join_pieces(args.resume, work / "resumed")
        note = json.loads((resumed / "training.json").read_text())
        level, earlier = max(level, note["level"]), note["step"]
    tokens = args.tokenizer or resumed
    if tokens is None:
        import gzip

        with gzip.open(args.corpus, "rt", encoding="utf-8") as lines:
            sentences = lines.read().split("\n")[: recipe.sentences]
        tokens = work / "tokenizer"
        tokenizer.save(tokenizer.train_tokenizer(sentences, recipe.vocab_size), tokens)
    from herald_jax.text import load_tokenizer

    table = load_tokenizer(tokens)
    end, mask = table.token_to_id(tokenizer.END), table.token_to_id(tokenizer.MASK)
    assert end is not None
    assert mask is not None
    config = export.model_config(
        vocab_size=table.vocab_size, hidden=recipe.hidden, mlp=recipe.mlp, layers=recipe.layers, heads=recipe.heads,
        kv_heads=recipe.kv_heads, head_dim=recipe.head_dim, context=recipe.context, block=rows.BLOCK, end=end,
        mask=mask,
    )  # fmt: skip
    computing = dataclasses.replace(config, dtype=recipe.dtype)  # type: ignore[arg-type]
    devices = len(jax.devices()) if args.devices is None else args.devices
    mesh = sharding.normalise_mesh(sharding.make_mesh(data=devices)) if devices > 1 else None
    params = initial_params(config, args.seed) if resumed is None else export.from_hf(config, resumed)
    place = jax.device_put(params, sharding.one_device()) if mesh is None else params
    state = training.init_state(training.master(place, mesh, config), recipe.optimizer, mesh)
    print(f"{sum(x.size for x in jax.tree.leaves(params)) / 1e6:.1f} M parameters on {devices} x "
          f"{jax.devices()[0].device_kind}", flush=True)  # fmt: skip

    context = multiprocessing.get_context("spawn")
    # Rows are drawn by (seed, step), and steps begin again: a run that goes on from another must not repeat its rows.
    settings = (str(args.corpus), str(tokens), args.seed + earlier, recipe.context, recipe.sentences)
    os.environ["JAX_PLATFORMS"], before = "cpu", os.environ.get("JAX_PLATFORMS")
    pool = context.Pool(args.workers, rows.start_worker, settings)
    if before is None:
        del os.environ["JAX_PLATFORMS"]
    else:
        os.environ["JAX_PLATFORMS"] = before
    try:
        attention = pick_attention(config) if args.attention == "auto" else {"xla": None}.get(args.attention, "cudnn")
        step = make_step(computing, recipe, attention, args.seed)
        programs = Programs(step, state, recipe.shapes, functools.partial(abstract_rows, mesh))
        curriculum = Curriculum(recipe.shapes, level, advance_at=recipe.advance_at)
        trainer = _Trainer(
            args, recipe, config, pool, programs, curriculum, mesh, work, Path(tokens), started, seconds, earlier
        )
        trainer.loop(state)
        programs.wait()
    finally:
        pool.terminate()
        pool.join()
        shutil.rmtree(work)


@dataclasses.dataclass
class _Trainer:
    args: argparse.Namespace
    recipe: Recipe
    config: ModelConfig
    pool: Any
    programs: Programs
    curriculum: Curriculum
    mesh: Any
    work: Path
    tokens: Path
    started: float
    seconds: float
    earlier: int

    def loop(self, state: training.TrainState) -> None:
        """Train until the time is over; the last fifth lowers the learning rate, unless another run is to follow."""
        with (self.args.out / "log.jsonl").open("a", encoding="utf-8") as log:
            self._loop(state, log)

    def _loop(self, state: training.TrainState, log: TextIO) -> None:
        out = self.args.out
        curve: list[tuple[int, float]] = []
        ordered: collections.deque[Any] = collections.deque()
        finished: collections.deque[Any] = collections.deque()
        number = asked = trained = since = 0
        logged = saved = begun = time.perf_counter()
        with tqdm(unit="step", file=sys.stderr, mininterval=5.0) as bar:
            while True:
                now = time.perf_counter()
                done = (now - self.started) / self.seconds
                if done >= 1 or number == self.args.steps:
                    break
                if now - begun > GIVE_UP_SECONDS and self.curriculum.stuck():
                    print("answers are still guessed at the shortest length: stopping", flush=True)
                    break
                while len(ordered) < 2 * self.args.workers + 2:
                    shape = self.curriculum.shape(asked)
                    shape = shape if shape in self.programs else self.recipe.shapes[0]
                    fits = max(i for i, size in enumerate(rows.LEVELS) if size <= shape.length)
                    order = rows.Order(asked, shape, min(self.curriculum.level, fits))
                    ordered.append((shape, self.pool.apply_async(rows.make_rows, (order,))))
                    asked += 1
                shape, promise = ordered.popleft()
                packed = training.place_batch(dataclasses.asdict(promise.get()), self.mesh)
                rate = self._rate(number, done)
                state, metrics = self.programs(shape, state, packed, np.float32(rate))
                number, trained = number + 1, trained + shape.batch * shape.length
                finished.append((number, metrics))
                while len(finished) > 3:  # read late, so that the device never waits for us
                    last = self._look(finished.popleft(), curve, done)
                bar.update()
                if now - logged > LOG_SECONDS and curve:
                    record = {
                        "seconds": round(now - self.started), "step": number,
                        "level": rows.LEVELS[self.curriculum.level],
                        "loss": round(float(np.mean([loss for _, loss in curve[-50:]])), 4),
                        "answers": round(float(last["answers"]), 4), "text": round(float(last["text"]), 4),
                        "grad_norm": round(float(last["grad_norm"]), 3), "rate": round(rate, 6),
                        "tokens_per_second": round((trained - since) / (now - logged)),
                        "by_length": self.curriculum.accuracy(0), "by_task": self.curriculum.accuracy(1),
                    }  # fmt: skip
                    print(json.dumps(record), file=log, flush=True)
                    print(json.dumps(record), flush=True)
                    bar.set_postfix_str(f"loss {record['loss']:.3f}, {record['tokens_per_second']:,} tokens/s")
                    logged, since = now, trained
                if now - saved > SAVE_SECONDS:
                    self._save(state, number)
                    saved = now
        for late in finished:
            self._look(late, curve, 0.0)
        self._save(state, number)
        if curve:
            training.plot_curve(curve, out / "curve.png", title="reference model, training loss")
        took = time.perf_counter() - begun
        summary = {"steps": number, "tokens": trained, "tokens_per_second": round(trained / took),
                   "level": rows.LEVELS[self.curriculum.level], "by_length": self.curriculum.accuracy(0)}  # fmt: skip
        print(json.dumps({"finished": summary}), file=log, flush=True)
        print(json.dumps({"finished": summary}), flush=True)

    def _look(self, finished: tuple[int, Any], curve: list[tuple[int, float]], done: float) -> Any:
        """Take in a finished step's figures; they are on the host then."""
        number, figures = finished
        host = jax.device_get(figures)
        curve.append((number, float(host["loss"])))
        self.curriculum.add(host["counts"])
        if self.curriculum.update(done):
            print(f"step {number}: up to {rows.LEVELS[self.curriculum.level]} tokens", flush=True)
        return host

    def _rate(self, number: int, done: float) -> float:
        rate = self.recipe.rate * min(1.0, (number + 1) / self.recipe.warmup)
        if self.args.decay > 0:
            rate *= min(1.0, max(0.02, (1 - done) / self.args.decay))
        return rate

    def _save(self, state: training.TrainState, number: int) -> None:
        directory = self.work / "model"
        shutil.rmtree(directory, ignore_errors=True)
        export.write_hf(directory, self.config, jax.device_get(state.trained), self.tokens)
        note = {"step": self.earlier + number, "level": self.curriculum.level, "by_length": self.curriculum.accuracy(0)}
        (directory / "training.json").write_text(json.dumps(note) + "\n", encoding="utf-8")
        export.split_directory(directory, self.args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="train.txt.gz of examples.reference_model.corpus")
    parser.add_argument("--tokenizer", type=Path, help="directory of a trained tokenizer (default: train one)")
    parser.add_argument("--minutes", type=float, default=8.0, help="wall time, compilation and all (default 8)")
    parser.add_argument("--steps", type=int, default=-1, help="stop after so many steps")
    parser.add_argument("--resume", type=Path, help="output of an earlier run")
    parser.add_argument("--level", type=int, default=0, help=f"begin with this level of {rows.LEVELS}")
    parser.add_argument("--decay", type=float, default=0.2, help="share of the time over which the rate falls; 0: not")
    parser.add_argument("--optimizer", choices=["muon", "adamw"])
    parser.add_argument("--rate", type=float, help="peak learning rate")
    parser.add_argument("--attention", choices=["auto", "xla", "cudnn"], default="auto")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 3))
    parser.add_argument("--devices", type=int, help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="seconds on a CPU, for nothing but to see it run")
    args = parser.parse_args()
    recipe = TINY if args.tiny else Recipe()
    if args.optimizer is not None:
        recipe = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, kind=args.optimizer))
    if args.rate is not None:
        recipe = dataclasses.replace(recipe, rate=args.rate)
    run(args, recipe)


if __name__ == "__main__":
    main()
