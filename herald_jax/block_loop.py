"""The jitted block loop: denoise, commit, next block, stop, for every row of a batch at its own pace.

One loop body is one forward of the whole batch. A row with masks left denoises; a row without commits: the forward it
takes part in has just written its finished block's K and V, so its block becomes prefix and its next canvas begins.
Rows never wait for each other, and denoising and committing share one compiled model. The body, `step`, is a plain
function: calling it in a Python `while` gives the same tokens (tests/herald_jax/test_block_loop.py). Under MAGE the
rows begin their blocks together, because one exact forward selects for all of them (`mage_blocks`).

Masks are positions (`known`), never token ids: a mask token typed into a prompt is data.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from herald_jax import mage_steps, pooled, select
from herald_jax.block_forward import forward, greedy_seed, position_keys
from herald_jax.cache import BESIDE_A_CACHE, DeviceKV
from herald_jax.denoise import Editing, Policy, Sampling, predict
from herald_jax.loop_state import LoopOptions, Phase, Rows, placed_rows
from herald_jax.mage import MageKV
from herald_jax.model import Params, Transformer, bind
from herald_jax.plans import Herald, Mage
from herald_jax.pooled import PooledKV


@functools.partial(jax.jit, static_argnames=("options",), donate_argnames=("cache",))
def first_canvas(
    params: Params,
    cache: DeviceKV | MageKV | PooledKV,
    last_hidden: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    prompt_length: jax.Array,
    limit: jax.Array,
    done: jax.Array,
    key: jax.Array,
    stops: jax.Array,
    sampling: Sampling,
    *,
    options: LoopOptions,
) -> Rows:
    """The state after prefill: each row's prompt remainder (or seed) is known, the rest of its first block masked."""
    contract = options.config.diffusion
    batch, block = tokens.shape[0], contract.block_length
    index = jnp.arange(block)[None, :]
    slots = length[:, None] + index
    canvas = jnp.take_along_axis(tokens, jnp.minimum(slots, tokens.shape[1] - 1), axis=1)
    known = slots < prompt_length[:, None]
    # A prefix with a NaN in it: a plan that leaves NaN entries out would not notice.
    failed = ~done & jnp.any(jnp.isnan(last_hidden), axis=-1)
    if contract.seeded:
        kernel = bind(options.config, params).head_kernel()
        keys = None if sampling.greedy else position_keys(key, length[:, None], jnp.zeros_like(length))
        greedy = greedy_seed(options, jnp.zeros_like(canvas[:, :1]))
        seed = predict(last_hidden[:, None], kernel, sampling, keys, greedy)
        needs_seed = ~known[:, :1] & ~done[:, None]
        canvas = jnp.where(needs_seed & (index == 0), seed.token, canvas)
        known = known | (index == 0)
        failed = failed | (needs_seed[:, 0] & jnp.isnan(seed.confidence[:, 0]))
    zero = jnp.zeros((batch,), jnp.int32)
    off = jnp.zeros((batch,), bool)
    rows = Rows(
        cache, tokens, prompt_length, limit, length, canvas, known, zero, off, prompt_length, off, done, failed, key,
        zero, zero, zero, jnp.zeros((), jnp.int32), zero, jnp.zeros((), jnp.int32), zero, zero,
    )  # fmt: skip
    return placed_rows(_settle(rows, stops, jnp.zeros((batch,), bool)), options.mesh)


def _settle(
    rows: Rows, stops: jax.Array, was_complete: jax.Array, editing: tuple[jax.Array, jax.Array] | None = None
) -> Rows:
    """Decide which rows are finished and which tokens are final, after the canvas changed.

    `editing`: bool[B], whether the row's block is final, and bool[B, M], what the step wrote. A block that may still be
    rewritten is not complete, whatever it holds; but a stop token ends its row in the step that writes one.
    """
    block = rows.canvas.shape[1]
    slots = rows.length[:, None] + jnp.arange(block)[None, :]
    prefix_known = jnp.cumprod(rows.known, axis=1).astype(bool)
    written = slots >= rows.prompt_length[:, None]
    stop = prefix_known & written & jnp.any(rows.canvas[:, :, None] == stops[None, None, :], axis=-1)
    complete = jnp.all(rows.known, axis=1)
    # Masks past the limit are never needed: what precedes them is final.
    full = jnp.all(rows.known | (slots >= rows.limit[:, None]), axis=1) & (rows.length + block >= rows.limit)
    stopped = jnp.any(stop, axis=1)
    if editing is not None:
        final, wrote = editing
        stopped = stopped & (final | jnp.any(stop & wrote, axis=1))
        complete, full = complete & final, full & final
    finished = rows.failed | stopped | full
    newly_done = finished & ~rows.done
    fresh = ~rows.done & ((complete & ~was_complete) | newly_done)
    end = rows.length + jnp.sum(prefix_known, axis=1, dtype=jnp.int32)
    tokens = rows.tokens.at[jnp.arange(rows.tokens.shape[0])[:, None], slots].set(
        jnp.where(rows.done[:, None], jnp.take_along_axis(rows.tokens, slots, axis=1), rows.canvas)
    )
    return dataclasses.replace(
        rows,
        tokens=tokens,
        ready=jnp.where(fresh & ~rows.failed, jnp.minimum(end, rows.limit), rows.ready),
        fresh=fresh,
        done=rows.done | finished,
        blocks=rows.blocks + (fresh & ~rows.failed),
    )


def step(
    model: Transformer,
    rows: Rows,
    policy: Policy,
    sampling: Sampling,
    stops: jax.Array,
    options: LoopOptions,
    *,
    phase: Phase = "dense",
    waiting: jax.Array | None = None,
    hidden: jax.Array | None = None,
) -> Rows:
    """One forward of the batch, and what follows from it for every row.

    `phase` says what the forward attends to: "dense" everything; under MAGE, "select" everything while choosing, and
    "sparse" what was chosen. Rows flagged in `waiting` (bool[B]) take no part in it. `hidden` `[B, M, E]` is the
    forward's result where it has been made already, layer by layer.
    """
    contract = options.config.diffusion
    batch, block = rows.canvas.shape
    index = jnp.arange(block)[None, :]
    active = ~rows.done if waiting is None else ~rows.done & ~waiting
    complete = jnp.all(rows.known, axis=1)
    committing = active & complete

    small = contract.small_block_length
    open_blocks = jnp.any(~rows.known.reshape(batch, block // small, small), axis=-1)
    window = jnp.argmax(open_blocks, axis=-1).astype(jnp.int32)  # leftmost small block with a mask
    eligible = ~rows.known & active[:, None] & (index // small == window[:, None])

    # Of a family with small blocks only the window's predictions are asked for (and, by a committing row, position 0's,
    # where its window then is), but by editing, and by HERALD's drafts.
    everywhere = isinstance(policy, Editing) or isinstance(options.plan, Herald)
    prediction, cache = forward(model, rows, window, active, sampling, options, phase, hidden, everywhere)
    editable = rewrite = jnp.zeros_like(rows.known)
    if isinstance(policy, Editing):
        editable = rows.known & active[:, None] & (rows.length[:, None] + index >= rows.prompt_length[:, None])
        changed = prediction.token != rows.canvas
        rewrite = policy.rewrite(editable=editable, changed=changed, confidence=prediction.confidence, post=rows.post)
        committing = committing & ~jnp.any(rewrite, axis=1)
    if isinstance(options.plan, Mage) and isinstance(cache, MageKV):
        if phase == "select":
            cache = mage_steps.finish_selection(cache, options.plan, rows.length, options.mesh, options.implementation)
            if options.plan.select_every > 1:
                cache = mage_steps.follow(cache, rows.length, block, options.mesh)
        else:
            counted = active & jnp.any(~rows.known, axis=1)
            cache = mage_steps.add_measured(cache, options.plan, rows.length, counted)
            cache = mage_steps.commit(cache, rows.length, committing, block, options.mesh, options.implementation)
        cache = mage_steps.keep(cache, options.plan, committing, block)
    if isinstance(cache, PooledKV):
        cache = pooled.after_step(
            cache, prediction.token, rows.length, committing, options.mesh, options.implementation
        )
    reveal = policy(
        eligible=eligible,
        confidence=prediction.confidence,
        entropy=prediction.entropy,
        step=rows.step,
        block_length=block,
    )
    reveal = reveal & eligible

    fresh_known = jnp.broadcast_to((index == 0) & contract.seeded, reveal.shape)
    used = eligible | editable | (fresh_known & committing[:, None])
    nan = jnp.any(used & jnp.isnan(prediction.confidence), axis=1)
    rows = dataclasses.replace(
        rows,
        cache=cache,
        canvas=jnp.where(reveal | rewrite, prediction.token, rows.canvas),
        known=rows.known | reveal,
        failed=rows.failed | nan,
        edited=rows.edited + jnp.sum(rewrite, axis=1, dtype=jnp.int32),
    )
    if isinstance(policy, Editing):
        # Judged before the next canvas begins: until it is committed, a complete block was not yet final.
        rows = _settle(rows, stops, jnp.zeros_like(complete), (committing, reveal | rewrite))
    rows = dataclasses.replace(
        rows,
        length=rows.length + block * committing,
        canvas=jnp.where(committing[:, None] & contract.seeded, prediction.token, rows.canvas),
        known=jnp.where(committing[:, None], fresh_known, rows.known),
        step=jnp.where(committing, 0, rows.step + active),
        whole_block=active & ~committing,
        forwards=rows.forwards + active,
        commits=rows.commits + committing,
        batch_forwards=rows.batch_forwards + 1,
        exact_forwards=rows.exact_forwards + (phase == "select"),
        post=jnp.where(committing, 0, rows.post + (active & complete)),
    )
    return rows if isinstance(policy, Editing) else _settle(rows, stops, complete & ~committing)


def mage_blocks(
    model: Transformer, rows: Rows, policy: Policy, sampling: Sampling, stops: jax.Array, options: LoopOptions
) -> Rows:
    """One block of every row that is not done: the exact steps, then sparse ones until each row has committed.

    Rows that are ahead wait at the first step of their next block. With `select_every`, only every so many blocks have
    exact steps; since rows begin their blocks together, they do so at the same blocks.
    """
    plan = options.plan
    assert isinstance(plan, Mage)
    later_phase: Phase = "select" if plan.selector == "oracle" else "sparse"  # the oracle chooses at every step
    sparse = ~rows.done & (select.budget_of(plan, rows.length) < rows.length)
    exact_steps: Any = plan.select_at_step
    begins = jnp.zeros((), bool)  # with a sparse step
    if plan.select_every > 1:
        begins = jnp.max(jnp.where(rows.done, 0, rows.commits)) % plan.select_every > 0
        exact_steps = jnp.where(begins, 0, exact_steps)
    if rows.canvas.shape[1] == 1:  # a single position is known, and so its one step commits it
        sparse = sparse & begins
    rows = dataclasses.replace(rows, sparse_blocks=rows.sparse_blocks + sparse)

    def exact(i: jax.Array, rows: Rows) -> Rows:
        waiting = (rows.step == 0) & (i > 0)
        return step(model, rows, policy, sampling, stops, options, phase="select", waiting=waiting)

    def inside(state: tuple[jax.Array, Rows]) -> jax.Array:
        begins, rows = state
        return begins | jnp.any(~rows.done & (rows.step > 0))

    def later(state: tuple[jax.Array, Rows]) -> tuple[jax.Array, Rows]:
        begins, rows = state
        waiting = (rows.step == 0) & ~begins
        rows = step(model, rows, policy, sampling, stops, options, phase=later_phase, waiting=waiting)
        return jnp.zeros((), bool), rows

    if plan.select_at_step == 1:
        rows = jax.lax.fori_loop(0, exact_steps, exact, rows)
    else:  # as many as there are: a block may be over before
        rows = jax.lax.while_loop(
            lambda state: (state[0] < exact_steps) & inside((state[0] == 0, state[1])),
            lambda state: (state[0] + 1, exact(*state)),
            (jnp.int32(0), rows),
        )[1]
    return jax.lax.while_loop(inside, later, (begins, rows))[1]


@functools.partial(jax.jit, static_argnames=("options",), donate_argnames=("rows",), compiler_options=BESIDE_A_CACHE)
def run_blocks(
    params: Params,
    rows: Rows,
    policy: Policy,
    sampling: Sampling,
    stops: jax.Array,
    pause: jax.Array,
    *,
    options: LoopOptions,
) -> Rows:
    """Write until every row is done, or, with `pause`, until a forward has finished a block of some row.

    Args:
      rows: donated. `stops` i32[S]: ids that end a row. `pause`: bool scalar, traced; streaming and whole runs are the
      same compiled program.
    """
    model = bind(options.config, params)

    advance = mage_blocks if isinstance(options.plan, Mage) else step

    def body(state: tuple[Rows, jax.Array]) -> tuple[Rows, jax.Array]:
        before = state[0].blocks
        rows = advance(model, state[0], policy, sampling, stops, options)
        return rows, pause & jnp.any(rows.blocks > before)

    def going(state: tuple[Rows, jax.Array]) -> jax.Array:
        return ~jnp.all(state[0].done) & ~state[1]

    rows, _ = jax.lax.while_loop(going, body, (rows, jnp.zeros((), bool)))
    return placed_rows(rows, options.mesh)
