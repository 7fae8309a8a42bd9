"""One forward of the block loop: every row's canvas through the model, and what it predicts.

Here the plan decides what a block attends to, and Fast-dLLM v2's sub-block cache whether all of the block runs or its
small block alone. What follows from a prediction is `block_loop.step`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from herald_jax import mage_steps, select
from herald_jax.cache import DenseAttend
from herald_jax.denoise import Prediction, Sampling, predict
from herald_jax.loop_state import LoopOptions, Phase, Rows
from herald_jax.mage import MageAttend
from herald_jax.model import Attend, Transformer
from herald_jax.plans import Herald, Mage
from herald_jax.pooled import PooledAttend


def forward(
    model: Transformer,
    rows: Rows,
    window: jax.Array,
    active: jax.Array,
    sampling: Sampling,
    options: LoopOptions,
    phase: Phase,
    made: jax.Array | None = None,
    everywhere: bool = True,
) -> tuple[Prediction, Any]:
    """Predictions `[B, M]` for the canvas and the cache holding its K and V.

    Unless `everywhere`, those outside of the small block `window` i32[B] are zeros.

    With shifted logits position i is predicted from hidden state i - 1; position 0, always known in its own block,
    holds the prediction of the last hidden state instead: the seed of the next block.
    """
    contract = options.config.diffusion
    batch, block = rows.canvas.shape
    inputs = rows.canvas
    if contract.mask_token_id is not None:
        inputs = jnp.where(rows.known, rows.canvas, contract.mask_token_id)
    shifted = contract.logit_alignment == "shifted"
    visible = jnp.where(active, rows.length + block, 0)[:, None]
    small = contract.small_block_length
    inside = (window * small)[:, None] + jnp.arange(small)[None, :]  # the window's positions

    def spread(x: jax.Array) -> jax.Array:
        # Not a scatter, which would be launches of its own.
        here = jnp.arange(block)[None, :] // small == window[:, None]
        return jnp.where(here, jnp.tile(x, (1, block // small)), jnp.zeros((), x.dtype))

    def run(offset: jax.Array, size: int, keep: jax.Array | None, cache: Any) -> tuple[Prediction, Any]:
        at = offset[:, None] + jnp.arange(size)[None, :]
        attend: Attend = DenseAttend(rows.length + offset, visible, keep, options.mesh, options.implementation)
        if isinstance(options.plan, Mage):
            # A committing row has no mask to ask for; if it selects (the oracle does), its whole block asks.
            asking = (~rows.known | jnp.all(rows.known, axis=1, keepdims=True)) & active[:, None]
            if phase == "sparse" and options.plan.query == "all":
                # To be measured only, as the paper does it: by the block's queries, those of all positions that chose.
                index = jnp.arange(block)[None, :]
                began = (rows.length[:, None] + index >= rows.prompt_length[:, None]) & (index >= int(contract.seeded))
                asking = began & active[:, None]
            cache, same = mage_steps.unchanged(cache, inputs, phase == "select")
            attend = MageAttend(
                rows.length,
                visible,
                select.query_rows(options.plan, asking),
                options.plan,
                phase == "sparse",
                options.mesh,
                options.implementation,
                same=same,
            )
        if isinstance(options.plan, Herald):
            attend = PooledAttend(
                rows.length, active, None, options.plan, contract, options.mesh, options.implementation
            )
        chosen = inputs if size == block else jnp.take_along_axis(inputs, at, axis=1)
        if made is None:
            hidden, cache = model(chosen, rows.length[:, None] + at, attend, cache)
        else:
            hidden = made
        if small < size and not everywhere:
            at = inside
            hidden = jnp.take_along_axis(hidden, ((at - shifted) % size)[:, :, None], axis=1)
        elif shifted:
            hidden = jnp.roll(hidden, 1, axis=1)
        target = jnp.where((at == 0) & shifted, block, at)
        keys = None if sampling.greedy else position_keys(rows.key, rows.length[:, None] + target, rows.step)
        greedy = None if sampling.greedy or size != block else greedy_seed(options, at)
        # Over a mesh the head is split, by vocabulary or not, and XLA's.
        head = "xla" if options.mesh is not None or options.implementation == "xla" else None
        found = predict(hidden, model.head_kernel(), sampling, keys, greedy, implementation=head, spared=options.spared)
        return (found if at.shape[1] == block else jax.tree.map(spread, found)), cache

    zero = jnp.zeros_like(window)
    if not options.block_cache:
        return run(zero, block, None, rows.cache)

    # Fast-dLLM v2's sub-block cache. A row refreshes its whole block's K and V at the block's first step, whenever the
    # first position of its small block is masked, and to commit; otherwise only its small block is written, and the
    # rest of the block is seen as the last refresh left it. The choice is the row's own: when one row refreshes, the
    # others take part in the whole-block forward but write no more than their small block.
    first_masked = ~jnp.take_along_axis(rows.known, (window * small)[:, None], axis=1)[:, 0]
    refresh = active & (~rows.whole_block | first_masked | jnp.all(rows.known, axis=1))

    def whole(cache: Any) -> tuple[Prediction, Any]:
        keep = refresh[:, None] | ((jnp.arange(block) // small)[None, :] == window[:, None])
        return run(zero, block, keep, cache)

    def partial(cache: Any) -> tuple[Prediction, Any]:
        return run(window * small, small, None, cache)

    # Two loops of at most one turn, not a `cond`: XLA updates a loop's carry in place, but in a branch it copies the
    # whole cache at every layer.
    def once(wanted: jax.Array, run_it: Any, carry: Any) -> Any:
        def body(state: Any) -> Any:
            return (jnp.zeros_like(wanted), *run_it(state[2]))

        return jax.lax.while_loop(lambda state: state[0], body, (wanted, *carry))[1:]

    zeros = jnp.zeros((batch, block), jnp.float32)
    carry = (Prediction(zeros.astype(jnp.int32), zeros, zeros), rows.cache)
    carry = once(jnp.any(refresh), whole, carry)
    return once(~jnp.any(refresh), partial, carry)


def position_keys(key: jax.Array, positions: jax.Array, step: jax.Array) -> jax.Array:
    """A key per absolute position `[B, T]` and step `[B]`: noise depends on neither the batch nor the window."""
    at_position = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(key, positions)
    return jax.vmap(jax.vmap(jax.random.fold_in, (0, None)))(at_position, step)


def greedy_seed(options: LoopOptions, at: jax.Array) -> jax.Array | None:
    """Which predictions, of positions `at` i32[B, T], take the argmax whatever the temperature: position 0, the seed,
    where the family says so."""
    contract = options.config.diffusion
    if not contract.seeded or contract.seed_rule == "sample":
        return None
    return at == 0
