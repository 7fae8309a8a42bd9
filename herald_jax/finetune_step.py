"""What fine-tuning repeats: the loss of a batch, the step that lowers it, and the loop of steps.

Plain: the block-diffusion objective of `objective.py`. For MAGE: cross-entropy of the sparse pass plus lambda times
KL(sparse || exact), as in arXiv 2602.14209. The entries that the sparse pass may see are chosen by an exact pass over
the same noisy blocks, which takes no gradient and is also the teacher; the clean sequence is run once for both.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from herald_jax import lora, training
from herald_jax.config import ModelConfig
from herald_jax.errors import ConfigError, GenerationError
from herald_jax.fields import FLOAT32_MOST, real, switch
from herald_jax.model import Params
from herald_jax.objective import TrainBatch, corrupt, noisy_hidden, token_loss
from herald_jax.plans import Dense, Mage, Plan
from herald_jax.train_attention import Mode, TrainAttend
from herald_jax.train_data import Source

MOST_SKIPPED = 20  # steps in a row without finite gradients that end a run


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """What is trained on.

    Attributes:
      plan: `Dense()` for the plain objective, `Mage(...)` for MAGE's.
      kl: lambda, the weight of KL(sparse || exact); MAGE only.
      exact: the weight of the exact pass's own cross-entropy (ours; the paper has none); MAGE only.
      canvas: which state of a block chooses what it may see: "noisy", the one that is learned from, as in the paper, or
        "first", wholly masked as when generation begins it (ours); MAGE only.
      lora_alpha: scale of the adapters, when adapters are what is trained.
      remat: recompute layers in the backward pass.
      implementation: of attention, None or "cudnn" (`train_attention.masked_attention`).
    """

    plan: Plan = dataclasses.field(default_factory=Dense)
    kl: float = 1.0
    exact: float = 0.0
    canvas: Literal["noisy", "first"] = "noisy"
    lora_alpha: float = 32.0
    remat: bool = True
    implementation: str | None = None

    def __post_init__(self) -> None:
        for name, what in (
            ("kl", "the weight of KL"), ("exact", "the weight of the exact pass"), ("lora_alpha", "lora_alpha"),
        ):  # fmt: skip
            value = getattr(self, name)
            number = real(value)
            if number is None or not 0 <= number <= FLOAT32_MOST:
                raise ConfigError(f"{what} is {value!r}, but must be 0 or positive, and finite")
            object.__setattr__(self, name, number)
        if not (isinstance(self.canvas, str) and self.canvas in ("noisy", "first")):
            raise ConfigError(f"canvas is {self.canvas!r}, but must be 'noisy' or 'first'")
        if switch(self.remat) is None:
            raise ConfigError(f"remat is {self.remat!r}, but must be True or False")
        if not isinstance(self.plan, (Dense, Mage)):
            raise ConfigError(f"there is no training objective for plan {self.plan!r}; use Dense() or Mage(...)")
        if isinstance(self.plan, Mage):
            found = (self.plan.selector, self.plan.allocate, self.plan.select_every)
            if found != ("mage", "uniform", 1):
                raise ConfigError("training for MAGE goes with selector 'mage', allocate 'uniform' and select_every 1")
            if self.plan.rest == "keep":
                # The passes that are compared are of one step, and there the rest makes up for all that is left out.
                raise ConfigError("training for MAGE goes with rest 'drop': with 'keep' its two passes are the same")


def block_loss(
    config: ModelConfig,
    params: Params,
    batch: TrainBatch,
    options: LossOptions,
    adapters: lora.Adapters | None = None,
    one_document: bool = True,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of one batch, and its parts: "ce", "kl", "accuracy" (of the holes); with `options.exact`, "exact_ce"."""
    dtype = jnp.dtype(config.dtype)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    head = params["embed"]["embedding"] if config.tie_word_embeddings else params["head"]["kernel"]
    more: dict[str, Any] = {"adapters": adapters, "alpha": options.lora_alpha, "remat": options.remat}

    def states(batch: TrainBatch, **attending: Any) -> jax.Array:
        attend = TrainAttend(
            batch.first, batch.at, batch.masked, batch.every_block, one_document=one_document,
            implementation=options.implementation, **attending,
        )  # fmt: skip
        return noisy_hidden(config, params, batch, attend, **more)[0]

    teacher = None
    if not isinstance(options.plan, Mage):
        found = token_loss(config, head, states(batch), batch)
    else:
        # All passes in one, beside one clean sequence. What is held takes no gradient: nothing of the sparse part is
        # computed from the others but which entries are chosen, and the teacher's predictions are held below.
        modes: tuple[Mode, ...] = ("select", "sparse")
        canvases = [batch.masked, batch.masked]
        if options.canvas == "first":
            assert batch.maskable is not None  # `corrupt` says it
            modes, canvases = ("select", "exact", "sparse"), [batch.maskable, *canvases]
        held = tuple(range(len(modes) - 1))
        several = dataclasses.replace(
            batch, masked=jnp.concatenate(canvases, axis=1), at=jnp.tile(batch.at, (1, len(modes))), maskable=None
        )
        hidden = states(several, plan=options.plan, mode=modes, held=held[:-1] if options.exact else held)
        *_, exact, sparse = jnp.split(hidden, len(modes), axis=1)
        found = token_loss(config, head, sparse, batch, jax.lax.stop_gradient(exact))
        teacher = token_loss(config, head, exact, batch) if options.exact else None
    ce, kl = found.mean(), found.mean_divergence()
    total = jnp.maximum(jnp.sum(found.weight), 1e-6)
    accuracy = jnp.sum(found.hit * found.weight) / total
    loss, parts = ce + options.kl * kl, {"ce": ce, "kl": kl, "accuracy": accuracy}
    if teacher is not None:
        parts["exact_ce"] = teacher.mean()
        loss += options.exact * parts["exact_ce"]
    return loss, parts


def make_finetune_step(
    config: ModelConfig,
    optimizer: training.Optimizer,
    options: LossOptions,
    *,
    frozen: Params | None = None,
    complementary: bool = True,
    full: float = 0.0,
    seed: int = 0,
) -> Callable[..., tuple[training.TrainState, Any]]:
    """`step(state, rows, rate)`: noise the rows by (seed, state.step), take the loss, update.

    `rows` is a dict of "tokens", "maskable" and "at". With `frozen`, the state's tree is LoRA adapters for them; best
    with joined layers (`joined_layers.join`), or each step joins a copy. They are an argument of the compiled program,
    not constants in it.
    """

    def advance(
        frozen: Params | None, state: training.TrainState, rows: dict[str, jax.Array], rate: Any
    ) -> tuple[training.TrainState, Any]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        batch = corrupt(
            key, rows["tokens"], config.diffusion, maskable=rows["maskable"], at=rows["at"],
            complementary=complementary, full=full,
        )  # fmt: skip

        def loss(trained: Any, batch: TrainBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
            if frozen is None:
                return block_loss(config, trained, batch, options)
            return block_loss(config, frozen, batch, options, adapters=trained)

        return training.make_step(loss, optimizer)(state, batch, rate)

    compiled = jax.jit(advance, donate_argnums=(1,))
    return lambda state, rows, rate: compiled(frozen, state, rows, rate)


def train(
    step: Callable[..., tuple[training.TrainState, Any]],
    state: training.TrainState,
    source: Source,
    *,
    steps: int,
    rate: Callable[[int], float],
    mesh: Mesh | None = None,
    directory: Path | None = None,
    save_every: int = 100,
) -> tuple[training.TrainState, list[tuple[int, float]]]:
    """Run to step number `steps`, from wherever `state` is; saves under `directory` every so often and at the end.

    Returns the state and the learning curve [(step, loss), ...]. The source is asked for each step by its number, so
    that a resumed run goes on as if it had never stopped. A step whose gradients are not finite changes nothing; how
    many those were is said at the end.

    Raises GenerationError after `MOST_SKIPPED` such steps in a row, or if all were.
    """
    begin = int(state.step)
    first = source.rows(begin)
    progress = training.Progress(steps, start=begin, tokens_per_step=first.tokens.size)
    waiting: tuple[int, Any] | None = None
    skipped = in_a_row = 0

    def look(number: int, metrics: Any) -> None:
        nonlocal skipped, in_a_row
        progress.add(number, float(metrics["loss"]))
        fine = math.isfinite(metrics["grad_norm"])
        skipped, in_a_row = skipped + (not fine), 0 if fine else in_a_row + 1
        if in_a_row == MOST_SKIPPED or in_a_row == number - begin == steps - begin:
            raise GenerationError(
                f"no step from {number - in_a_row + 1} to {number} had finite gradients (the last loss is "
                f"{float(metrics['loss'])}), and so none changed anything: try a lower learning rate, and see whether "
                "the model's own numbers are finite"
            )

    try:
        for number in range(begin, steps):
            rows = source.rows(number)
            state, metrics = step(state, training.place_batch(dataclasses.asdict(rows), mesh), np.float32(rate(number)))
            # The loss is looked at one step late: reading it at once would stop the device from working ahead.
            if waiting is not None:
                look(*waiting)
            waiting = (number + 1, metrics)
            if directory is not None and ((number + 1) % save_every == 0 or number + 1 == steps):
                look(*waiting)  # what ends the run leaves no state that looks finished
                waiting = None
                training.save_state(directory, state)
        if waiting is not None:
            look(*waiting)
    finally:
        progress.close()
    if skipped:
        print(
            f"{skipped} of {steps - begin} steps had gradients that are not finite, and changed nothing",
            file=sys.stderr,
        )
    return state, progress.curve
