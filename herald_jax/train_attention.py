"""Attention while training: clean blocks among themselves, noisy blocks over the clean ones before them and themselves.

No array of [B, H, T, T] ever exists: queries are taken in chunks, a chunk of clean queries sees only the keys up to its
end, and scores are computed again in the backward pass. `implementation="cudnn"` hands each chunk to cuDNN's flash
attention with the visibility as its mask instead.

Shape letters: B batch, N clean tokens, M block length, S noisy blocks, K KV heads, G = H // K, D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from herald_jax import select
from herald_jax.plans import Mage

CLEAN_CHUNK = 1024
NOISY_CHUNK = 512
Mode = Literal["exact", "select", "sparse"]


def masked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, implementation: str | None = None
) -> jax.Array:
    """Softmax attention with an explicit mask; every query must see something.

    q `[B, T, K, G, D]`; k, v `[B, S, K, D]`; mask bool `[B or 1, K or 1, T, S]`. Returns `[B, T, K, G, D]`.
    implementation: None or "xla" (float32 scores, computed again in the backward pass), or "cudnn".
    """
    b, t, heads, group, d = q.shape
    if implementation == "cudnn":
        per_head = mask if mask.shape[1] == 1 else jnp.repeat(mask, group, axis=1)
        out = jax.nn.dot_product_attention(
            q.reshape(b, t, heads * group, d), k, v, mask=per_head, scale=d**-0.5, implementation="cudnn"
        )
        return out.reshape(q.shape)
    return jax.checkpoint(_scores_and_values)(q, k, v, mask)


def _weights(q: jax.Array, k: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention weights f32`[B, K, T, G, S]`.

    One matrix of T * G queries per KV head, so that the scores come out with the keys along the last axis: given the
    axes apart, XLA makes them along the queries, and each softmax runs across memory and is transposed afterwards.
    """
    b, t, heads, group, d = q.shape
    folded = jnp.swapaxes(q, 1, 2).reshape(b, heads, t * group, d)
    precision = "highest" if q.dtype == jnp.float32 else None
    scores = jnp.einsum(
        "bkqd,bksd->bkqs", folded, jnp.swapaxes(k, 1, 2), preferred_element_type=jnp.float32, precision=precision
    )
    scores = scores.reshape(b, heads, t, group, -1)
    scores = jnp.where(mask[:, :, :, None], scores * d**-0.5, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1)


def _scores_and_values(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    b, t, heads, group, d = q.shape
    precision = "highest" if q.dtype == jnp.float32 else None
    weights = _weights(q, k, mask).astype(v.dtype).reshape(b, heads, t * group, -1)
    out = jnp.einsum("bkqs,bksd->bkqd", weights, jnp.swapaxes(v, 1, 2), precision=precision).astype(q.dtype)
    return jnp.swapaxes(out.reshape(b, heads, t, group, d), 1, 2)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["first", "at", "masked"],
    meta_fields=["every_block", "mode", "plan", "held", "one_document", "implementation"],
)
@dataclasses.dataclass(frozen=True)
class TrainAttend:
    """The `attend` of `objective.noisy_hidden`; its queries are the N clean tokens, then the S * M noisy ones.

    Attributes:
      first, at, masked, every_block: as in `objective.TrainBatch`.
      mode: "exact"; "select" is exact too and returns each noisy block's most important prefix entries; "sparse" lets
        noisy blocks see only entries chosen before. Several modes: the noisy blocks are as many parts of one size, of
        the same blocks, and the "sparse" part sees what the "select" part before it has chosen.
      plan: what "select" chooses and which layers "sparse" leaves alone.
      held: the parts, of several, whose attention takes no gradient.
      one_document: a promise that `first` is all zeros, so that no mask depends on the row.
      implementation: of `masked_attention`.
    """

    first: jax.Array
    at: jax.Array
    masked: jax.Array
    every_block: bool = False
    mode: Mode | tuple[Mode, ...] = "exact"
    plan: Mage | None = None
    held: tuple[int, ...] = ()
    one_document: bool = False
    implementation: str | None = None

    def __call__(self, layer: Any, q: jax.Array, k: jax.Array, v: jax.Array, chosen: Any) -> tuple[jax.Array, Any]:
        """q `[B, N + S*M, K, G, D]`; k, v `[B, N + S*M, K, D]`; chosen bool`[B, S, K, N]` in mode "sparse"
        alone, else None.

        Returns the output and, in mode "select", what this layer's noisy blocks would choose (else None).
        """
        block = self.masked.shape[2]
        length = k.shape[1] - self.masked.shape[1] * block
        out = []
        for start, stop in _chunks(0, length, max(block, CLEAN_CHUNK // block * block)):
            mask = self._clean_mask(start, stop, block)
            out.append(masked_attention(q[:, start:stop], k[:, :stop], v[:, :stop], mask, self.implementation))
        choices: list[jax.Array] = []
        modes = self.mode if isinstance(self.mode, tuple) else (self.mode,)
        size = (k.shape[1] - length) // len(modes)
        per_view = length if self.every_block else size
        # Each chunk's own keys are extra columns for all of its queries: small beside short prefixes.
        grain = max(block, min(NOISY_CHUNK, max(128, length // 4)) // block * block)
        for view in range(length, k.shape[1], per_view):
            part, source = (view - length) // size, (q, k, v)
            mode, offset = modes[part], length + part * size
            if part in self.held:
                source = jax.lax.stop_gradient(source)
            if mode == "sparse" and chosen is None:
                chosen = jnp.concatenate(choices, axis=1)
            for start, stop in _chunks(view, view + per_view, grain):
                # Copies of all blocks, in order: a chunk of them needs no keys behind its own last block.
                end = stop - view if self.every_block else length
                blocks = slice((start - length) // block, (stop - length) // block)
                queries = source[0][:, start:stop]
                keys, values = (jnp.concatenate([x[:, :end], x[:, start:stop]], axis=1) for x in source[1:])
                seen = self._prefix_mask(blocks, end, block)[:, None]  # [B, 1, blocks, end]
                if mode == "sparse":
                    assert self.plan is not None
                    these = chosen[:, (start - offset) // block : (stop - offset) // block, :, :end]
                    allowed = jnp.swapaxes(these, 1, 2)
                    seen = seen & (allowed | (layer < self.plan.dense_layers))
                mask = self._with_own_block(seen, block)
                out.append(masked_attention(queries, keys, values, mask, self.implementation))
                if mode == "select":
                    choices.append(self._choose(queries, keys, mask, blocks, length, end))
        found = jnp.concatenate(choices, axis=1) if self.mode == "select" else None
        return jnp.concatenate(out, axis=1), found

    def _clean_mask(self, start: int, stop: int, block: int) -> jax.Array:
        """bool[B or 1, 1, stop - start, stop]: block-causal within the document."""
        query = jnp.arange(start, stop) // block
        key = jnp.arange(stop) // block
        mask = (key[None, :] <= query[:, None])[None]
        if not self.one_document:
            first = jnp.repeat(self.first, block, axis=1)[:, start:stop]
            mask = mask & (key[None, None, :] >= first[:, :, None])
        return mask[:, None]

    def _prefix_mask(self, blocks: slice, end: int, block: int) -> jax.Array:
        """bool[B, blocks, end]: the clean entries that each noisy block sees, those of earlier blocks."""
        at = self.at[:, blocks]
        key = (jnp.arange(end) // block)[None, None, :]
        mask = key < at[:, :, None]
        if not self.one_document:
            mask = mask & (key >= jnp.take_along_axis(self.first, at, axis=1)[:, :, None])
        return mask

    @staticmethod
    def _with_own_block(seen: jax.Array, block: int) -> jax.Array:
        """From bool[B, K or 1, blocks, end] to bool[B, K or 1, blocks * M, end + blocks * M]."""
        b, heads, blocks, end = seen.shape
        prefix = jnp.broadcast_to(seen[:, :, :, None], (b, heads, blocks, block, end)).reshape(b, heads, -1, end)
        index = jnp.arange(blocks * block) // block
        own = jnp.broadcast_to(index[:, None] == index[None, :], (b, heads, blocks * block, blocks * block))
        return jnp.concatenate([prefix, own], axis=-1)

    def _choose(
        self, q: jax.Array, keys: jax.Array, mask: jax.Array, blocks: slice, length: int, end: int
    ) -> jax.Array:
        """bool[B, blocks, K, N]: the plan's entries for each noisy block, by this layer's exact attention."""
        plan = self.plan
        assert plan is not None  # mode "select" comes with one
        asking = self.masked[:, blocks]
        b, count, block = asking.shape
        asking = asking.reshape(b * count, block)
        # A block without holes asks with all its positions, as a committing block does when it generates.
        rows = select.query_rows(plan, asking | ~jnp.any(asking, axis=1, keepdims=True))
        counted = select.chosen(rows, block).reshape(b, 1, count, block, 1, 1)
        weights = jax.lax.stop_gradient(_weights(q, keys, mask))
        heads, group = weights.shape[1], weights.shape[3]
        inside = weights[..., :end]
        if plan.normalise == "prefix":
            inside = inside / jnp.maximum(jnp.sum(inside, axis=-1, keepdims=True), 1e-30)
        inside = inside.reshape(b, heads, count, block, group, end)
        if plan.reduce == "max":
            score = jnp.max(jnp.where(counted, inside, 0.0), axis=(3, 4))
        else:
            score = jnp.sum(jnp.where(counted, inside, 0.0), axis=(3, 4))
        score = jnp.moveaxis(score, 2, 1).reshape(b * count, heads, end)  # [B * blocks, K, end]
        prefix = (self.at[:, blocks] * block).reshape(-1)
        budget = select.budget_of(plan, prefix)
        capacity = select.selected_capacity(plan, length)
        indices = select.pick(plan, score, budget, prefix, capacity, "xla")
        r, h = jnp.arange(b * count)[:, None, None], jnp.arange(heads)[None, :, None]
        flags = jnp.zeros(score.shape, bool).at[r, h, jnp.where(indices < 0, end, indices)].set(True, mode="drop")
        flags = flags.reshape(b, count, heads, end)
        return jnp.pad(flags, ((0, 0), (0, 0), (0, 0), (0, length - end)))


def _chunks(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]
