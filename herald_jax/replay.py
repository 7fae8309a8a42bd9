"""Forced-token replay: what a plan predicts when every step of every block starts from the same tokens.

Free-running answers drift apart after the first token that differs, and then say little about attention. So the dense
plan's trajectory is recorded: the canvas, and what was known of it, before each denoising step. A plan then makes the
same steps from the same states, its own predictions are only looked at, and what is committed are the recorded tokens.

HERALD's pipeline is run block by block: the draft holds what was recorded and the plan's own guesses of the rest, as it
does when the plan writes by itself; the host's cache is scanned with its queries, and the next block's pool filled.
Nothing is hidden behind anything else, which changes no prediction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax import block_loop, draft_moment
from herald_jax.cache import DeviceKV
from herald_jax.config import GenerateConfig
from herald_jax.denoise import Editing, Policy, Sampling, StaticLowConfidence
from herald_jax.errors import GenerationError
from herald_jax.generate import capacity_for
from herald_jax.herald import Pipeline
from herald_jax.loading import Model
from herald_jax.loop_state import LoopOptions, Rows, placed_rows
from herald_jax.mage import MageKV
from herald_jax.model import bind
from herald_jax.plans import Dense, Herald, Mage, Plan
from herald_jax.pooled import PooledKV, note_drafts
from herald_jax.prefill import chunk_length, prefill
from herald_jax.request import check_request

_GREEDY = Sampling.of(0.0, 0, 1.0)
_ALL_AT_ONCE = StaticLowConfidence(1)  # reveals every masked position, so that every prediction can be read
_NO_STOPS = np.array([-1], np.int32)


@dataclasses.dataclass(frozen=True)
class State:
    """One row before a denoising step: canvas i32[M], known bool[M], and which positions the step then revealed."""

    canvas: np.ndarray
    known: np.ndarray
    revealed: np.ndarray
    predicted: np.ndarray


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One row's blocks, each a list of its steps, and the block as it was committed, i32[M].

    `room` and `policy` are as requested: the policy decides when HERALD drafts, if that is "auto".
    """

    prompt: list[int]
    blocks: list[tuple[list[State], np.ndarray]]
    room: int = 0
    policy: Policy = _ALL_AT_ONCE


@functools.partial(jax.jit, static_argnames=("options", "phase"), donate_argnames=("rows",))
def _step(
    params: Any, rows: Rows, policy: Any, stops: jax.Array, *, options: LoopOptions, phase: Any
) -> tuple[Rows, jax.Array]:
    """One step under `policy`, and what the model predicted at every masked position."""
    model = bind(options.config, params)
    canvas = rows.canvas
    after = block_loop.step(model, rows, policy, _GREEDY, stops, options, phase=phase)
    after = placed_rows(after, options.mesh)
    return after, jnp.where(rows.known, canvas, after.canvas)


def _start(
    model: Model, prompt: list[int], new_tokens: int, plan: Plan, room: int
) -> tuple[Rows, LoopOptions, Pipeline | None]:
    """One row, prefilled, at its first canvas; it never stops by itself. HERALD's pipeline is to be closed."""
    config, block = model.config, model.config.diffusion.block_length
    check_request(config, GenerateConfig(max_new_tokens=new_tokens), plan, [prompt])
    whole = np.array([len(prompt) // block * block], np.int32)
    chunk = chunk_length(int(whole[0]), 1024, block) if whole[0] else block
    end = -(-max(len(prompt) + new_tokens, room) // block) * block + 2 * block
    capacity = capacity_for(max(end, -(-int(whole[0]) // chunk) * chunk))
    tokens = np.zeros((1, capacity), np.int32)
    tokens[0, : len(prompt)] = prompt
    options = LoopOptions(config, model.mesh, plan=plan)
    pipeline: Pipeline | None = None
    kv: Any
    if isinstance(plan, Herald):
        pipeline = Pipeline(model.params, options)
        known = whole[:, None] + np.arange(block)[None, :] < len(prompt)
        kv, last = pipeline.prefill(tokens, whole, known, capacity=capacity, longest=end, chunk=chunk)
    else:
        cache = DeviceKV.empty(config, 1, capacity, model.mesh)
        kv, last = prefill(model.params, cache, tokens, whole, config=config, chunk=chunk, mesh=model.mesh)
    if isinstance(plan, Mage):
        kv = MageKV.around(kv, plan, config, end, model.mesh)
    length = np.array([len(prompt)], np.int32)
    rows = block_loop.first_canvas(
        model.params, kv, last, tokens, whole, length, np.array([capacity], np.int32), np.zeros(1, bool),
        jax.random.split(jax.random.key(0), 1), np.array([-1], np.int32), _GREEDY, options=options,
    )  # fmt: skip
    return rows, options, pipeline


def check_config(config: GenerateConfig) -> None:
    """Raises GenerationError for what cannot be replayed: sampled decoding, and token editing."""
    if config.temperature > 0:
        raise GenerationError(
            f"temperature is {config.temperature}, but a replay needs greedy decoding (temperature 0)"
        )
    if isinstance(config.policy, Editing):
        raise GenerationError(
            "a replay's blocks are final when they hold no mask, so it does not go with token editing"
        )


def record(model: Model, prompt: Sequence[int], config: GenerateConfig) -> Trajectory:
    """What the dense plan does with one prompt: greedy, until a stop token is final or `max_new_tokens` are written.

    Raises GenerationError as `generate` and `check_config` do.
    """
    check_config(config)
    rows, options, _ = _start(model, list(prompt), config.max_new_tokens, Dense(), config.room)
    ends = set(model.config.diffusion.stop_token_ids if config.stop_token_ids is None else config.stop_token_ids)
    blocks: list[tuple[list[State], np.ndarray]] = []
    limit = len(prompt) + config.max_new_tokens
    while True:
        states: list[State] = []
        start = int(rows.length[0])
        while not (known := np.asarray(rows.known[0])).all():
            canvas = np.asarray(rows.canvas[0])
            rows, _ = _step(model.params, rows, config.policy, _NO_STOPS, options=options, phase="dense")
            after = np.asarray(rows.known[0])
            states.append(State(canvas, known, after & ~known, np.asarray(rows.canvas[0])))
        final = np.asarray(rows.canvas[0])
        blocks.append((states, final))
        new = final[max(0, len(prompt) - start) :].tolist()
        if start + len(final) >= limit or ends & set(new):
            return Trajectory(list(prompt), blocks, config.room, config.policy)
        rows, _ = _step(model.params, rows, config.policy, _NO_STOPS, options=options, phase="dense")  # commit


def replay(model: Model, trajectory: Trajectory, plan: Plan) -> float:
    """Share of the revealed positions at which `plan`, from the recorded state, predicts the recorded token.

    A block's selecting steps are exact and agree by construction; they count like any other, as they do in an answer.
    Raises GenerationError for a plan that the model cannot serve.
    """
    states = [state for block, _ in trajectory.blocks for state in block]
    agreed = total = 0
    for state, predicted in zip(states, predictions(model, trajectory, plan), strict=True):
        agreed += int((predicted == state.predicted)[state.revealed].sum())
        total += int(state.revealed.sum())
    return agreed / max(total, 1)


def predictions(model: Model, trajectory: Trajectory, plan: Plan) -> Iterator[np.ndarray]:
    """What `plan` predicts from each recorded state, one after the other: i32[M], recorded tokens where they are known.

    Of positions that a step could not have revealed (outside its small block) nothing is said.
    """
    block = model.config.diffusion.block_length
    new_tokens = len(trajectory.blocks) * block
    context = model.config.max_position_embeddings
    new_tokens = min(new_tokens, context - len(trajectory.prompt))
    rows, options, pipeline = _start(model, trajectory.prompt, new_tokens, plan, trajectory.room)
    step = functools.partial(_step, model.params, policy=_ALL_AT_ONCE, stops=_NO_STOPS, options=options)
    with pipeline or contextlib.nullcontext():
        for index, (states, final) in enumerate(trajectory.blocks):
            if pipeline is not None:
                last = index + 1 == len(trajectory.blocks)
                rows = yield from _herald_block(pipeline, rows, states, final, trajectory.policy, options, step, last)
                continue
            for number, state in enumerate(states):
                rows = _forced(rows, state.canvas, state.known, number)
                phase = "dense" if isinstance(plan, Dense) else "sparse"
                if isinstance(plan, Mage) and (number < _exact_steps(plan, index) or plan.selector == "oracle"):
                    phase = "select"
                rows, predicted = step(rows, phase=phase)
                yield np.asarray(predicted[0])
            rows = _forced(rows, final, np.ones(block, bool), max(len(states), 1))
            phase = "dense" if isinstance(plan, Dense) else "sparse"
            if isinstance(plan, Mage) and not states and _exact_steps(plan, index):
                phase = "select"
            rows, _ = step(rows, phase=phase)  # commit


def _herald_block(
    pipeline: Pipeline, rows: Rows, states: Sequence[State], final: np.ndarray, policy: Policy,
    options: LoopOptions, step: Any, last: bool,
) -> Generator[np.ndarray, None, Rows]:  # fmt: skip
    """One block under HERALD, and, unless it is the `last`, the pool of the next one."""
    plan, cache = options.plan, _pooled(rows)
    assert isinstance(plan, Herald)
    moment = draft_moment.revealed(rows.length, policy, plan=plan, config=options.config)
    off = jnp.zeros_like(cache.committed)
    rows = _with(rows, dataclasses.replace(cache, committed=off, drafted=jnp.copy(off), draft_from=moment))
    turn: Callable[[Rows], Rows] | None = None
    after = [*((state.canvas, state.known) for state in states[1:]), (final, np.ones(final.shape, bool))]
    for number, state in enumerate(states):
        rows = _forced(rows, state.canvas, state.known, number)
        if number == 0 and not plan.draft:
            rows, turn = pipeline.prepare_exactly(rows, _ALL_AT_ONCE, _GREEDY, _NO_STOPS)
            yield np.where(state.known, state.canvas, np.asarray(rows.canvas[0]))
        else:
            rows, predicted = step(rows, phase="sparse")
            yield np.asarray(predicted[0])
        rows = _forced(rows, *after[number], number + 1)
        if not last and turn is None:
            rows = _with(rows, note_drafts(_pooled(rows), rows.canvas, rows.known, rows.done))
            if bool(_pooled(rows).drafted[0]):
                rows, turn = pipeline.prepare(rows)
    rows = _forced(rows, final, np.ones(final.shape, bool), len(states))
    rows, _ = step(rows, phase="sparse")  # commit
    return rows if last or turn is None else turn(rows)


def _pooled(rows: Rows) -> PooledKV:
    assert isinstance(rows.cache, PooledKV)
    return rows.cache


def _with(rows: Rows, cache: PooledKV) -> Rows:
    return dataclasses.replace(rows, cache=cache)


def _exact_steps(plan: Mage, block: int) -> int:
    return plan.select_at_step if block % plan.select_every == 0 else 0


def _forced(rows: Rows, canvas: np.ndarray, known: np.ndarray, step: int) -> Rows:
    """`rows` (one of them) in a recorded state, alive."""
    return dataclasses.replace(
        rows, canvas=jnp.asarray(canvas)[None], known=jnp.asarray(known)[None], done=jnp.zeros((1,), bool),
        step=jnp.full((1,), step, jnp.int32),
    )  # fmt: skip
