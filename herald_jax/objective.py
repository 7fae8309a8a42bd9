"""The block-diffusion training objective: noisy blocks x_t that attend to the clean sequence x_0.

Sources: BD3-LM (arXiv 2503.09573) for [x_t | x_0] and its mask, Fast-dLLM v2 (arXiv 2509.26328) for complementary masks
and shifted labels. One sequence of N tokens is run once, block-causally; beside it run noisy copies of some or all of
its blocks, each seeing the clean blocks before its own and itself. The published objective copies every block (twice,
with complementary masks). Copying only the blocks that hold answers makes long contexts cheap to train on: many
questions share one prefix.

Shape letters: B batch, N clean tokens, M block length, S noisy blocks, V vocabulary, E hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from herald_jax.config import DiffusionContract, ModelConfig
from herald_jax.errors import ConfigError
from herald_jax.joined_layers import JOINED
from herald_jax.lora import Adapters, merge_layer
from herald_jax.model import Params, bind, rope_angles
from herald_jax.train_attention import TrainAttend

# float32 logits held at once.
_LOGITS_BYTES = 512 << 20
# Up to this vocabulary the embedding's gradient is a one-hot matmul: a scatter-add into few rows is 10x slower.
_ONE_HOT_VOCAB = 16384


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "positions", "first", "at", "masked", "weight", "maskable"],
    meta_fields=["every_block"],
)
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """What one step learns from.

    Attributes:
      tokens: i32[B, N], clean; N is a multiple of the block length.
      positions: i32[B, N], for the rotary embedding.
      first: i32[B, N // M], the first block that each block may see: where its document begins. Zeros: one document.
      at: i32[B, S], the block that each noisy block is a copy of.
      masked: bool[B, S, M], which of its tokens are holes.
      weight: f32[B, S, M], of each token's loss; only holes count.
      every_block: whether `at` is all blocks in order, once per view (a static promise that halves the attention).
      maskable: bool[B, S, M], which of its tokens are holes when the block is begun; None if that is not known.
    """

    tokens: jax.Array
    positions: jax.Array
    first: jax.Array
    at: jax.Array
    masked: jax.Array
    weight: jax.Array
    every_block: bool = False
    maskable: jax.Array | None = None

    @property
    def block_length(self) -> int:
        return self.masked.shape[2]

    def targets(self) -> jax.Array:
        """i32[B, S, M]: the clean tokens of the noisy blocks."""
        blocks = self.tokens.reshape(self.tokens.shape[0], -1, self.block_length)
        return jnp.take_along_axis(blocks, self.at[:, :, None], axis=1)


def check_family(contract: DiffusionContract) -> None:
    """Raises ConfigError for a model without a mask token."""
    if contract.mask_token_id is None:
        raise ConfigError("the model has no mask token, so there is nothing to denoise; training needs a block dLLM")


def corrupt(
    key: jax.Array,
    tokens: jax.Array,
    contract: DiffusionContract,
    *,
    maskable: jax.Array | None = None,
    at: jax.Array | None = None,
    positions: jax.Array | None = None,
    first: jax.Array | None = None,
    complementary: bool = True,
    full: jax.typing.ArrayLike = 0.0,
    eps: float = 1e-3,
) -> TrainBatch:
    """Noise blocks of `tokens` i32[B, N], each with a level of its own, p = (1 - eps) t + eps with t uniform.

    Args:
      maskable: bool[B, N], which tokens may become holes (the answer, in supervised fine-tuning); None: all.
      at: i32[B, S], the blocks to copy; None: every block, in order.
      positions, first: as in `TrainBatch`; None: one document from position 0.
      complementary: two views, the second masking exactly what the first left; every token is learned once.
      full: share of the blocks that are masked entirely, as every block is when its decoding begins (ours); a number
        or f32[B, S, 1].

    Raises: ConfigError unless N is a multiple of the block length and the model has a mask token.
    """
    batch, length = tokens.shape
    block = contract.block_length
    check_family(contract)
    if length % block:
        raise ConfigError(f"sequences have {length} tokens, but a multiple of the block length {block} was expected")
    blocks = length // block
    every = at is None
    if at is None:
        at = jnp.broadcast_to(jnp.arange(blocks), (batch, blocks))
    copies = at.shape[1]
    level_key, mask_key, full_key = jax.random.split(key, 3)
    level = (1 - eps) * jax.random.uniform(level_key, (batch, copies, 1)) + eps
    level = jnp.where(jax.random.uniform(full_key, (batch, copies, 1)) < full, 1.0, level)
    drawn = jax.random.uniform(mask_key, (batch, copies, block)) < level
    if maskable is None:
        allowed = jnp.ones_like(drawn)
    else:
        allowed = jnp.take_along_axis(maskable.reshape(batch, blocks, block), at[:, :, None], axis=1)
    masked = drawn & allowed
    if complementary:
        masked = jnp.concatenate([masked, ~drawn & allowed], axis=1)
        at, allowed = (jnp.concatenate([x, x], axis=1) for x in (at, allowed))
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    if first is None:
        first = jnp.zeros((batch, blocks), jnp.int32)
    weight = jnp.ones(masked.shape, jnp.float32)
    return TrainBatch(tokens, positions, first, at.astype(jnp.int32), masked, weight, every, allowed)


@jax.custom_vjp
def _lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take(table, tokens, axis=0)


def _lookup_forward(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Any]:
    return jnp.take(table, tokens, axis=0), (tokens, table)


def _lookup_backward(saved: Any, grad: jax.Array) -> tuple[jax.Array, None]:
    tokens, table = saved
    # Along the sequence, row by row of the batch: the one-hot matrix is never larger than one chunk's.
    batch, length = tokens.shape
    chunks = max(1, batch * length * table.shape[0] * 2 // _LOGITS_BYTES)
    while length % chunks:
        chunks += 1

    def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        ids, g = part
        hot = jax.nn.one_hot(ids, table.shape[0], dtype=g.dtype)
        return total + jnp.einsum("btv,bte->ve", hot, g, preferred_element_type=jnp.float32), None

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(batch, chunks, length // chunks, *x.shape[2:]), 1, 0)

    total, _ = jax.lax.scan(add, jnp.zeros(table.shape, jnp.float32), (split(tokens), split(grad)))
    return total.astype(table.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of `table` [V, E] for `tokens` i32[B, T]."""
    return _lookup(table, tokens) if table.shape[0] <= _ONE_HOT_VOCAB else jnp.take(table, tokens, axis=0)


def noisy_hidden(
    config: ModelConfig,
    params: Params,
    batch: TrainBatch,
    attend: TrainAttend,
    chosen: jax.Array | None = None,
    *,
    adapters: Adapters | None = None,
    alpha: float = 1.0,
    remat: bool = False,
    scan: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """Run [x_0 | x_t] and return the hidden states `[B, S, M, E]` of the noisy blocks.

    Args:
      params: in the dtype to compute in (`config.dtype`); their layers may be joined (`joined_layers.join`).
      attend: how noisy blocks see the clean ones (`train_attention.TrainAttend`).
      chosen: bool[L, B, S, K, N], the prefix entries that each layer may see, when `attend.mode` is "sparse".
      adapters, alpha: LoRA, merged layer by layer inside what `remat` recomputes.
      remat: recompute each layer in the backward pass instead of keeping its activations.
      scan: compile one layer for all, if they are alike; copies the layers' parameters once, unless they are joined.

    Returns:
      The hidden states, and the entries that each layer chose when `attend.mode` is "select" (else None).
    """
    rows, length = batch.tokens.shape
    holes = config.diffusion.mask_token_id
    assert holes is not None  # `corrupt` and the recipe checked it
    joined = params["layers"].get(JOINED)
    if joined is None:
        model = bind(config, params)
    else:  # a model of one layer, whose leaves are all layers'
        model = bind(dataclasses.replace(config, num_layers=1), params | {"layers": {"0": joined}})
    noisy = jnp.where(batch.masked, holes, batch.targets()).reshape(rows, -1)
    blocked = batch.positions.reshape(rows, -1, batch.block_length)
    noisy_positions = jnp.take_along_axis(blocked, batch.at[:, :, None], axis=1).reshape(rows, -1)
    x = embed(model.embed.embedding[...], jnp.concatenate([batch.tokens, noisy], axis=1))
    positions = jnp.concatenate([batch.positions, noisy_positions], axis=1)
    angles = rope_angles(config.rope, config.head_dim, positions)
    split = [nnx.split(layer) for layer in model.layers]
    added = [_of_layer(adapters, i) for i in range(config.num_layers)]

    def run(graph: Any, state: Any, added: Any, index: Any, x: jax.Array, chosen: Any) -> tuple[jax.Array, Any]:
        state = merge_layer(state, added, alpha=alpha) if added else state
        return nnx.merge(graph, state)(index, x, angles, attend, chosen)

    graph = split[0][0]
    if joined is not None or (scan and all(other == graph for other, _ in split[1:])):
        stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
        stacked = split[0][1] if joined is not None else stack(*(state for _, state in split))
        more = stack(*added)

        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            state, added, index, chosen = layer
            return run(graph, state, added, index, x, chosen)

        step = jax.checkpoint(body) if remat else body
        x, choices = jax.lax.scan(step, x, (stacked, more, jnp.arange(config.num_layers), chosen))
    else:
        made = []
        for i, (graph, state) in enumerate(split):
            call = functools.partial(run, graph)
            x, choice = (jax.checkpoint(call) if remat else call)(
                state, added[i], jnp.int32(i), x, None if chosen is None else chosen[i]
            )
            made.append(choice)
        choices = None if made[0] is None else jnp.stack(made)
    hidden = model.norm(x[:, length:])
    return hidden.reshape(rows, -1, batch.block_length, hidden.shape[-1]), choices


def _of_layer(adapters: Adapters | None, index: int) -> Adapters:
    start = f"layers/{index}/"
    return {path.removeprefix(start): value for path, value in (adapters or {}).items() if path.startswith(start)}


def predictors(hidden: jax.Array, batch: TrainBatch, contract: DiffusionContract) -> tuple[jax.Array, jax.Array]:
    """The hidden state that speaks for each noisy position, `[B, S, M, E]`, and whether there is one, bool[B, S, M].

    With shifted logits position i is predicted by position i - 1; the first of a block by the last of the noisy block
    before it, if that one is there (it always is when every block is copied; the very first token has none).
    """
    if contract.logit_alignment == "same":
        return hidden, jnp.ones(hidden.shape[:3], bool)
    before = jnp.roll(hidden[:, :, -1], 1, axis=1)
    follows = jnp.concatenate([jnp.zeros_like(batch.at[:, :1], bool), batch.at[:, 1:] == batch.at[:, :-1] + 1], axis=1)
    same = jnp.take_along_axis(batch.first, batch.at, axis=1) < batch.at  # not the first block of its document
    there = jnp.ones(hidden.shape[:3], bool).at[:, :, 0].set(follows & same)
    return jnp.concatenate([before[:, :, None], hidden[:, :, :-1]], axis=2), there


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """Per noisy position, all f32 or bool `[B, S, M]`: cross-entropy, the weight it counts with, and whether the most
    probable token is the right one; `divergence` is KL(sparse || exact) or zeros."""

    nll: jax.Array
    weight: jax.Array
    hit: jax.Array
    divergence: jax.Array

    def mean(self) -> jax.Array:
        """The cross-entropy, weighted."""
        return jnp.sum(self.nll * self.weight) / jnp.maximum(jnp.sum(self.weight), 1e-6)

    def mean_divergence(self) -> jax.Array:
        """KL(sparse || exact), weighted likewise."""
        return jnp.sum(self.divergence * self.weight) / jnp.maximum(jnp.sum(self.weight), 1e-6)


jax.tree_util.register_dataclass(TokenLoss, data_fields=["nll", "weight", "hit", "divergence"], meta_fields=[])


def token_loss(
    config: ModelConfig, head: jax.Array, hidden: jax.Array, batch: TrainBatch, teacher: jax.Array | None = None
) -> TokenLoss:
    """Cross-entropy of every hole, from `noisy_hidden`'s states; with `teacher`, states of the exact pass, the KL too.

    `head` is [V, E]. Logits are float32 and exist for a few positions at a time, also in the backward pass.
    """
    speaking, there = predictors(hidden, batch, config.diffusion)
    weight = batch.weight * (batch.masked & there)
    rows, noisy, block = speaking.shape[:3]
    total = noisy * block
    chunks = min(total, max(1, -(-rows * total * head.shape[0] * 4 // _LOGITS_BYTES)))
    while total % chunks:
        chunks += 1
    precision = "highest" if head.dtype == jnp.float32 else None

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(rows, chunks, total // chunks, *x.shape[3:]), 1, 0)

    def logits(x: jax.Array) -> jax.Array:
        return jnp.einsum("bte,ve->btv", x, head, preferred_element_type=jnp.float32, precision=precision)

    @jax.checkpoint
    def some(part: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        x, labels, other = part
        ours = logits(x)
        log_p = jax.nn.log_softmax(ours, axis=-1)
        nll = -jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
        hit = jnp.argmax(ours, axis=-1) == labels
        if other is None:
            return nll, hit, jnp.zeros_like(nll)
        exact = jax.nn.log_softmax(jax.lax.stop_gradient(logits(other)), axis=-1)
        return nll, hit, jnp.sum(jnp.exp(log_p) * (log_p - exact), axis=-1)

    other = None if teacher is None else split(predictors(teacher, batch, config.diffusion)[0])
    parts = jax.lax.map(some, (split(speaking), split(batch.targets()), other))
    nll, hit, divergence = (jnp.moveaxis(x, 0, 1).reshape(rows, noisy, block) for x in parts)
    return TokenLoss(nll, weight, hit, divergence)
