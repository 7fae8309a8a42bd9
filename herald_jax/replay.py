"""Forced-token replay: what a plan predicts when every step of every block starts from the same tokens.

Free-running answers drift apart after the first token that differs, and then say little about attention. So the dense
plan's trajectory is recorded: the canvas, and what was known of it, before each denoising step. A plan then makes the
same steps from the same states, its own predictions are only looked at, and what is committed are the recorded tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax import block_loop
from herald_jax.cache import DeviceKV
from herald_jax.config import GenerateConfig
from herald_jax.denoise import Sampling, StaticLowConfidence
from herald_jax.errors import GenerationError
from herald_jax.generate import capacity_for, check_request
from herald_jax.loading import Model
from herald_jax.mage import MageKV
from herald_jax.model import bind
from herald_jax.plans import Dense, Mage, Plan
from herald_jax.prefill import chunk_length, prefill


@dataclasses.dataclass(frozen=True)
class State:
    """One row before a denoising step: canvas i32[M], known bool[M], and which positions the step then revealed."""

    canvas: np.ndarray
    known: np.ndarray
    revealed: np.ndarray
    predicted: np.ndarray


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One row's blocks, each a list of its steps, and the block as it was committed, i32[M]; `room` as requested."""

    prompt: list[int]
    blocks: list[tuple[list[State], np.ndarray]]
    room: int = 0


@functools.partial(jax.jit, static_argnames=("options", "phase"), donate_argnames=("rows",))
def _step(
    params: Any, rows: block_loop.Rows, policy: Any, stops: jax.Array, *, options: block_loop.LoopOptions, phase: Any
) -> tuple[block_loop.Rows, jax.Array]:
    """One step under `policy`, and what the model predicted at every masked position."""
    model = bind(options.config, params)
    greedy = Sampling.of(0.0, 0, 1.0)
    canvas = rows.canvas
    after = block_loop.step(model, rows, policy, greedy, stops, options, phase=phase)
    return after, jnp.where(rows.known, canvas, after.canvas)


def _start(
    model: Model, prompt: list[int], new_tokens: int, plan: Plan, room: int
) -> tuple[block_loop.Rows, block_loop.LoopOptions]:
    """One row, prefilled, at its first canvas; it never stops by itself."""
    config, block = model.config, model.config.diffusion.block_length
    check_request(config, GenerateConfig(max_new_tokens=new_tokens), plan, [prompt])
    whole = np.array([len(prompt) // block * block], np.int32)
    chunk = chunk_length(int(whole[0]), 1024, block) if whole[0] else block
    end = -(-max(len(prompt) + new_tokens, room) // block) * block + 2 * block
    capacity = capacity_for(max(end, -(-int(whole[0]) // chunk) * chunk))
    tokens = np.zeros((1, capacity), np.int32)
    tokens[0, : len(prompt)] = prompt
    cache = DeviceKV.empty(config, 1, capacity)
    cache, last = prefill(model.params, cache, tokens, whole, config=config, chunk=chunk)
    kv: Any = cache
    if isinstance(plan, Mage):
        kv = MageKV.around(cache, plan, config, end, None)
    options = block_loop.LoopOptions(config, plan=plan)
    length = np.array([len(prompt)], np.int32)
    rows = block_loop.first_canvas(
        model.params, kv, last, tokens, whole, length, np.array([capacity], np.int32), np.zeros(1, bool),
        jax.random.split(jax.random.key(0), 1), np.array([-1], np.int32), Sampling.of(0.0, 0, 1.0), options=options,
    )  # fmt: skip
    return rows, options


def record(model: Model, prompt: Sequence[int], config: GenerateConfig) -> Trajectory:
    """What the dense plan does with one prompt: greedy, until a stop token is final or `max_new_tokens` are written.

    Raises GenerationError as `generate` does, and for sampled decoding.
    """
    if config.temperature > 0:
        raise GenerationError(
            f"temperature is {config.temperature}, but a replay needs greedy decoding (temperature 0)"
        )
    rows, options = _start(model, list(prompt), config.max_new_tokens, Dense(), config.room)
    stops = np.array([-1], np.int32)
    ends = set(model.config.diffusion.stop_token_ids if config.stop_token_ids is None else config.stop_token_ids)
    blocks: list[tuple[list[State], np.ndarray]] = []
    limit = len(prompt) + config.max_new_tokens
    while True:
        states: list[State] = []
        start = int(rows.length[0])
        while not (known := np.asarray(rows.known[0])).all():
            canvas = np.asarray(rows.canvas[0])
            rows, _ = _step(model.params, rows, config.policy, stops, options=options, phase="dense")
            after = np.asarray(rows.known[0])
            states.append(State(canvas, known, after & ~known, np.asarray(rows.canvas[0])))
        final = np.asarray(rows.canvas[0])
        blocks.append((states, final))
        new = final[max(0, len(prompt) - start) :].tolist()
        if start + len(final) >= limit or ends & set(new):
            return Trajectory(list(prompt), blocks, config.room)
        rows, _ = _step(model.params, rows, config.policy, stops, options=options, phase="dense")  # commit


def replay(model: Model, trajectory: Trajectory, plan: Plan) -> float:
    """Share of the revealed positions at which `plan`, from the recorded state, predicts the recorded token.

    A block's selecting steps are exact and agree by construction; they count like any other, as they do in an answer.
    Raises GenerationError for plans that do not run in the block loop.
    """
    if not isinstance(plan, (Dense, Mage)):
        raise GenerationError(f"a replay is for plans dense and mage, not {type(plan).__name__.lower()}")
    block = model.config.diffusion.block_length
    new_tokens = len(trajectory.blocks) * block
    context = model.config.max_position_embeddings
    new_tokens = min(new_tokens, context - len(trajectory.prompt))
    rows, options = _start(model, trajectory.prompt, new_tokens, plan, trajectory.room)
    stops = np.array([-1], np.int32)
    all_at_once = StaticLowConfidence(1)  # reveals every masked position, so that every prediction can be read
    agreed = total = 0
    for index, (states, final) in enumerate(trajectory.blocks):
        for number, state in enumerate(states):
            rows = _forced(rows, state.canvas, state.known, number)
            phase = "dense" if isinstance(plan, Dense) else "sparse"
            if isinstance(plan, Mage) and (number < _exact_steps(plan, index) or plan.selector == "oracle"):
                phase = "select"
            rows, predicted = _step(model.params, rows, all_at_once, stops, options=options, phase=phase)
            same = np.asarray(predicted[0]) == state.predicted
            agreed += int(same[state.revealed].sum())
            total += int(state.revealed.sum())
        rows = _forced(rows, final, np.ones(block, bool), max(len(states), 1))
        phase = "dense" if isinstance(plan, Dense) else "sparse"
        if isinstance(plan, Mage) and not states and _exact_steps(plan, index):
            phase = "select"
        rows, _ = _step(model.params, rows, all_at_once, stops, options=options, phase=phase)  # commit
    return agreed / max(total, 1)


def _exact_steps(plan: Mage, block: int) -> int:
    return plan.select_at_step if block % plan.select_every == 0 else 0


def _forced(rows: block_loop.Rows, canvas: np.ndarray, known: np.ndarray, step: int) -> block_loop.Rows:
    """`rows` (one of them) in a recorded state, alive."""
    return dataclasses.replace(
        rows, canvas=jnp.asarray(canvas)[None], known=jnp.asarray(known)[None], done=jnp.zeros((1,), bool),
        step=jnp.full((1,), step, jnp.int32),
    )  # fmt: skip
