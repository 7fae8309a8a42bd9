"""Expert layers: a router that sends each token to a few of many MLPs, and the grouped matmuls that compute them.

`pallas_kernels.grouped` computes the pairs of token and expert: sorted by expert, none dropped, only the weights of
chosen experts read (kernels on Hopper, elsewhere a loop). Each token's result is put together from its own pairs
in the order of their rank, so it does not depend on which other tokens share the batch. The router and its weights are
float32 whatever the model's dtype: published ports that rounded it chose other experts.

Shape letters: B batch, T query tokens, E hidden, X experts, k experts per token, F width of one expert.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from herald_jax.config import ModelConfig, MoEConfig
from pallas_kernels import dispatch, grouped_route
from pallas_kernels.grouped import grouped_sum
from pallas_kernels.stream_matmul import gated_matmul, stream_matmul


def route(
    logits: jax.Array,
    moe: MoEConfig,
    bias: jax.Array | None = None,
    block_length: int | None = None,
    implementation: str | None = "xla",
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token and their weights.

    Args:
      logits: f32[B, T, X], the router's.
      moe: says how experts are chosen; see `MoEConfig`.
      bias: f32[X], added to the scores for choosing only; None without `moe.expert_bias`.
      block_length: tokens per block, needed with `moe.block_capacity`; T must be whole blocks.
      implementation: "xla", or None for one kernel (`pallas_kernels.grouped_route`) where it can run; on one device.

    Returns:
      Weights f32[B, T, k] and experts i32[B, T, k], best first; the lower number wins a tie.

    Sources: transformers' Glm4Moe (sigmoid, groups, bias) and Qwen3Moe (softmax); SGLang's `llada2.py` (block routing,
    pull request 31768 and its reference in `test_block_topk_triton`): no groups, the block's highest score per expert.
    """
    if moe.block_capacity is None:
        chosen = dispatch.select(
            implementation, lambda: dispatch.choose_experts_missing(logits, moe.num_groups, moe.experts_per_token)
        )
        kernel, plain = functools.partial(_route_kernel, moe=moe), functools.partial(_route, moe=moe)
        return dispatch.run(chosen, kernel, plain, logits, bias)
    return _route(logits, bias, moe=moe, block_length=block_length)


def _route_kernel(logits: jax.Array, bias: jax.Array | None, *, moe: MoEConfig) -> tuple[jax.Array, jax.Array]:
    choice = grouped_route.Choice(
        moe.experts_per_token, moe.router == "softmax", moe.renormalise, moe.routed_scaling, moe.num_groups,
        moe.groups_per_token,
    )  # fmt: skip
    found = grouped_route.choose_experts(logits.reshape(-1, logits.shape[-1]), bias, choice=choice)
    weights, experts = (x.reshape(*logits.shape[:-1], -1) for x in found)
    return weights, experts


def _route(
    logits: jax.Array, bias: jax.Array | None, *, moe: MoEConfig, block_length: int | None = None
) -> tuple[jax.Array, jax.Array]:
    if moe.router == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias.reshape((1,) * (scores.ndim - 1) + bias.shape)
    if moe.block_capacity is not None:
        if block_length is None or logits.shape[1] % block_length:
            raise ValueError(f"block routing needs whole blocks: {logits.shape[1]} tokens, block length {block_length}")
        choice = _within_block(choice, moe.block_capacity, block_length)
    elif moe.num_groups > 1:
        choice = _within_groups(choice, moe)
    experts = _best(choice, moe.experts_per_token)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if moe.renormalise:
        # A sum of sigmoids can underflow, hence LLaDA2's 1e-20; beside a softmax's best k, at least k / X, it is lost.
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * moe.routed_scaling, experts


# Up to so many comparisons the best are found by comparing all with all: one fusion, where `top_k` is a kernel or two
# of its own, and a layer would need three. A block of 32 tokens among 256 experts makes 2 million.
_COMPARED = 1 << 26


def _ranks(values: jax.Array) -> jax.Array:
    """How many along the last axis are larger, or equal and come first: i32, the shape of `values`."""
    number = jnp.arange(values.shape[-1])
    one, other = values[..., :, None], values[..., None, :]
    first = (number[None, :] < number[:, None]).reshape((1,) * (values.ndim - 1) + (number.size, number.size))
    return jnp.sum((other > one) | ((other == one) & first), axis=-1, dtype=jnp.int32)


def _best(values: jax.Array, k: int) -> jax.Array:
    """Indices i32[..., k] of the largest along the last axis, best first, ties to the lower: `jax.lax.top_k`'s."""
    size = values.shape[-1]
    if values.size * size > _COMPARED:
        return jax.lax.top_k(values, k)[1]
    at_rank = jax.nn.one_hot(_ranks(values), k, axis=-2, dtype=jnp.int32)  # [..., k, size]
    number = jnp.arange(size, dtype=jnp.int32).reshape((1,) * values.ndim + (size,))
    # Nothing ranks among NaNs: their row gets some experts all the same, and spoils only itself.
    return jnp.minimum(jnp.sum(at_rank * number, axis=-1), size - 1)


def _within_groups(choice: jax.Array, moe: MoEConfig) -> jax.Array:
    """`choice` with -inf outside each token's best groups."""
    grouped = choice.reshape(*choice.shape[:-1], moe.num_groups, -1)
    first = jax.nn.one_hot(jnp.argmax(grouped, axis=-1), grouped.shape[-1], dtype=jnp.bool_)
    two_best = jnp.max(grouped, axis=-1) + jnp.max(jnp.where(first, -jnp.inf, grouped), axis=-1)
    inside = _ranks(two_best) < moe.groups_per_token
    return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(choice.shape)


def _within_block(choice: jax.Array, capacity: int, block_length: int) -> jax.Array:
    """`choice` f32[B, T, X] with -inf outside the experts that the token's block has chosen."""
    batch, length, experts = choice.shape
    blocks = choice.reshape(batch, length // block_length, block_length, experts)
    inside = _ranks(jnp.max(blocks, axis=2)) < capacity
    return jnp.where(inside[:, :, None, :], blocks, -jnp.inf).reshape(choice.shape)


def apply_experts(
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    implementation: str | None = None,
) -> jax.Array:
    """The weighted sum of each token's experts' SwiGLU MLPs.

    Args:
      x: `[B, T, E]`. weights, experts: `[B, T, k]`, from `route`.
      gate_up: `[X, E, 2, F]`, down: `[X, F, E]`, in the dtype of `x`. A slice of F gives that slice's part of the sum.
      implementation: passed to `grouped_sum`.

    Returns:
      f32[B, T, E].
    """
    tokens, by, chosen = (a.reshape(-1, a.shape[-1]) for a in (x, weights, experts))
    total = grouped_sum(tokens, by, chosen, gate_up, down, dtype=jnp.float32, implementation=implementation)
    return total.reshape(x.shape)


class _Router(nnx.Module):
    def __init__(self, config: ModelConfig, moe: MoEConfig):
        shape = (config.hidden_size, moe.num_experts)
        self.kernel = nnx.Param(jnp.zeros(shape, jnp.float32), axes=("embed", "experts"))
        if moe.expert_bias:
            self.bias = nnx.Param(jnp.zeros((moe.num_experts,), jnp.float32), axes=("experts",))


class _Experts(nnx.Module):
    def __init__(self, config: ModelConfig, moe: MoEConfig, dtype: Any):
        x, e, f = moe.num_experts, config.hidden_size, moe.intermediate_size
        self.gate_up = nnx.Param(jnp.zeros((x, e, 2, f), dtype), axes=("experts", "embed", "pair", "mlp"))
        self.down = nnx.Param(jnp.zeros((x, f, e), dtype), axes=("experts", "mlp", "embed"))


class MoE(nnx.Module):
    """What stands in an expert layer where others have their MLP.

    `shared` is the MLP that every token passes beside its experts, or None. On a mesh each device holds a slice of
    every expert's width ("mlp" over the "model" axis) and computes its part of all its rows' pairs; the parts are
    summed.
    """

    def __init__(self, config: ModelConfig, dtype: Any, shared: Any):
        moe = config.moe
        assert moe is not None
        self.moe, self.block_length = moe, config.diffusion.block_length
        self.router = _Router(config, moe)
        self.experts = _Experts(config, moe, dtype)
        if shared is not None:
            self.shared = shared

    def __call__(self, x: jax.Array, mesh: Mesh | None = None) -> jax.Array:
        """`x` `[B, T, E]` to the same shape and dtype."""
        logits = _logits(x, self.router.kernel[...], mesh)
        bias = self.router.bias[...] if self.moe.expert_bias else None
        # A kernel is one device's, and the router's logits are split over the mesh.
        how = "xla" if mesh is not None else None
        weights, experts = route(logits, self.moe, bias, self.block_length, how)
        gate_up, down = self.experts.gate_up[...], self.experts.down[...]
        if mesh is None:
            tokens, weights, experts = (a.reshape(-1, a.shape[-1]) for a in (x, weights, experts))
            extra = _shared(self.shared, tokens) if hasattr(self, "shared") else None
            return grouped_sum(tokens, weights, experts, gate_up, down, extra, dtype=x.dtype).reshape(x.shape)
        rows = P("data", None, None)
        apply = jax.shard_map(
            functools.partial(_summed_over_model, apply_experts),
            mesh=mesh,
            in_specs=(rows, rows, rows, P(None, None, None, "model"), P(None, "model", None)),
            out_specs=rows,
            check_vma=False,
        )
        routed = apply(x, weights, experts, gate_up, down).astype(x.dtype)
        return routed + self.shared(x) if hasattr(self, "shared") else routed


def _logits(x: jax.Array, kernel: jax.Array, mesh: Mesh | None) -> jax.Array:
    """`x @ kernel` in float32: x `[B, T, E]`, kernel f32[E, X].

    On Hopper a 16-bit x goes through the tensor cores, float32 numbers as three of bfloat16. Measured on an H200: an
    error of 1e-7, where ordinary float32 arithmetic has 3e-7, in two thirds of its time.
    """

    def plain(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.einsum("bte,ex->btx", x.astype(jnp.float32), kernel, precision="highest")

    def in_parts(x: jax.Array, kernel: jax.Array) -> jax.Array:
        how = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6
        return jax.lax.dot_general(x.astype(jnp.float32), kernel, (((2,), (0,)), ((), ())), precision=how)

    form = "xla" if mesh is not None or x.dtype == jnp.float32 else dispatch.select(None, lambda: None)
    return dispatch.run(form, in_parts, plain, x, kernel)


def _shared(mlp: Any, x: jax.Array) -> jax.Array:
    """What `model._MLP` computes of x `[R, E]`, as partial sums `[S, R, E]` by a denoising step's matmuls."""
    return stream_matmul(gated_matmul(x, mlp.gate_up.kernel[...]), mlp.down.kernel[...])


def _summed_over_model(function: Any, *args: jax.Array) -> jax.Array:
    return jax.lax.psum(function(*args), "model")
