"""Block decoding stated once more, in plain Python: one row, no cache, no batch, no loop on the device.

Every denoising step runs the whole sequence under a block-causal mask that is written out, and decides with float64
NumPy and Python loops. Nothing of `cache`, `prefill`, `denoise` or `block_loop` is used; the transformer's layers are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.config import ModelConfig
from herald_jax.denoise import EntropyBound, Policy, Sequential, StaticLowConfidence, Threshold
from herald_jax.loading import Model
from herald_jax.model import bind

WIDTH = 64  # tokens of the one compiled pass


@dataclasses.dataclass(frozen=True)
class Decoded:
    """New tokens of a row, and the denoising steps of each of its blocks."""

    tokens: list[int]
    steps: list[int]


@functools.partial(jax.jit, static_argnames="config")
def _pass(config: ModelConfig, params: Any, tokens: Any, fresh: Any, kept: Any) -> Any:
    """Logits f32[N, V] of i32[N] and every layer's (k, v); positions not `fresh` are seen as `kept` holds them."""
    block = jnp.arange(tokens.shape[0]) // config.diffusion.block_length
    visible = (block[:, None] >= block[None, :])[None, None, None]

    def attend(layer: int, q: Any, k: Any, v: Any, cache: Any) -> Any:
        if kept is not None:
            k, v = (jnp.where(fresh[None, :, None, None], x, old) for x, old in zip((k, v), kept[layer], strict=True))
        scores = jnp.einsum("btkgd,bnkd->bkgtn", q, k, precision="highest") / np.sqrt(config.head_dim)
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bkgtn,bnkd->btkgd", weights, v, precision="highest"), [*cache, (k, v)]

    module = bind(config, params)
    hidden, cache = module(tokens[None], jnp.arange(tokens.shape[0])[None], attend, [])
    return jnp.einsum("te,ve->tv", hidden[0], module.head_kernel(), precision="highest"), cache


def quota(block_length: int, steps: int | None, step: int) -> int:
    """Positions that step `step` must reveal: the block spread over `steps`, the remainder over the first of them."""
    steps = min(steps or block_length, block_length)
    return block_length // steps + (step < block_length % steps)


def odds_of(line: np.ndarray) -> tuple[np.ndarray, float]:
    """The softmax f64[V] of one position's logits, and its entropy."""
    odds = np.exp(line.astype(np.float64) - line.max())
    odds /= odds.sum()
    return odds, -np.sum(odds * np.log(np.maximum(odds, 1e-300)))


def reveal(
    policy: Policy, eligible: Sequence[int], confidence: Any, entropy: Any, step: int, block_length: int
) -> set[int]:
    """Which of the eligible positions a policy reveals; confidence and entropy are indexed by position."""
    count = min(quota(block_length, policy.steps, step), len(eligible))
    surest = sorted(eligible, key=lambda position: (-confidence[position], position))
    if isinstance(policy, Sequential):
        return set(sorted(eligible)[:count])
    if isinstance(policy, StaticLowConfidence):
        return set(surest[:count])
    if isinstance(policy, Threshold):
        sure = {position for position in eligible if confidence[position] > policy.threshold}
        return sure if len(sure) >= count else set(surest[:count])
    assert isinstance(policy, EntropyBound)
    chosen: set[int] = set()
    total = 0.0
    for position in sorted(eligible, key=lambda position: (entropy[position], position)):
        total += float(entropy[position])
        if len(chosen) < count or total < policy.bound:
            chosen.add(position)
    return chosen


def support(scaled: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Which tokens may be drawn, bool[V]: the top_k largest, then the fewest of those that together reach top_p."""
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    order = order[: top_k or len(order)]
    weights = np.exp(scaled[order].astype(np.float64) - scaled.max())
    allowed = np.zeros(len(scaled), bool)
    mass = 0.0
    for token, share in zip(order, weights / weights.sum(), strict=True):
        if mass >= top_p and top_p < 1:
            break
        allowed[token] = True
        mass += share
    return allowed


@functools.partial(jax.jit, static_argnames="size")
def _noise(key: Any, position: Any, step: Any, size: int) -> Any:
    return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, position), step), (size,), jnp.float32)


class _Row:
    """One row on its way; `tokens` and `known` are indexed by absolute position."""

    def __init__(self, model: Model, prompt: Sequence[int], key: Any, request: Any, stops: Sequence[int]):
        self.model, self.key, self.request, self.stops = model, key, request, stops
        hole = model.config.diffusion.mask_token_id or 0
        self.first, self.limit = len(prompt), len(prompt) + request.max_new_tokens
        self.tokens = [*prompt, *[hole] * (WIDTH - len(prompt))]
        self.known = [position < len(prompt) for position in range(WIDTH)]

    def run(self, fresh: Any = None, kept: Any = None) -> tuple[np.ndarray, Any]:
        flags = np.ones(WIDTH, bool) if fresh is None else fresh
        logits, cache = _pass(self.model.config, self.model.params, np.array(self.tokens, np.int32), flags, kept)
        return np.asarray(logits), cache

    def pick(self, logits: np.ndarray, position: int, step: int, greedy: bool = False) -> int:
        request = self.request
        if request.temperature == 0 or greedy:
            return int(np.argmax(logits))
        scaled = (logits - logits.max()) / np.float32(request.temperature)
        noisy = scaled + np.asarray(_noise(self.key, np.int32(position), np.int32(step), len(logits)))
        return int(np.argmax(np.where(support(scaled, request.top_k, request.top_p), noisy, -np.inf)))

    def put(self, position: int, token: int) -> None:
        self.tokens[position], self.known[position] = token, True

    def new(self) -> tuple[list[int], bool]:
        """What is final behind the prompt, and whether the row is finished."""
        end = self.known.index(False, self.first)
        written = self.tokens[self.first : end]
        stop = next((i for i, token in enumerate(written) if token in self.stops), None)
        if stop is not None:
            return written[: min(stop + 1, self.limit - self.first)], True
        return written[: self.limit - self.first], end >= self.limit


def decode(model: Model, prompt: Sequence[int], key: Any, request: Any, stops: Sequence[int] = ()) -> Decoded:
    """Continue one prompt as `generate` must: `request` is a GenerateConfig, `stops` the stop token ids in force."""
    contract = model.config.diffusion
    size, small = contract.block_length, contract.small_block_length
    row = _Row(model, prompt, key, request, stops)
    start = len(prompt) // size * size
    step, steps = 0, []
    while not row.new()[1]:
        if contract.seeded and not row.known[start]:
            row.put(start, row.pick(row.run()[0][start - 1], start, step, contract.seed_rule == "argmax"))
        step, kept = 0, None
        while not row.new()[1] and not all(row.known[start : start + size]):
            low = next(p for p in range(start, start + size) if not row.known[p]) // small * small
            window = range(low, low + small)
            eligible = [position for position in window if not row.known[position]]
            if request.block_cache and kept is not None and row.known[low]:
                logits, _ = row.run(np.isin(np.arange(WIDTH), window), kept)
            else:
                logits, kept = row.run()
            shift = 1 if contract.logit_alignment == "shifted" else 0
            picks, confidence, entropy = {}, {}, {}
            for position in eligible:
                odds, entropy[position] = odds_of(logits[position - shift])
                picks[position] = row.pick(logits[position - shift], position, step)
                confidence[position] = odds[picks[position]]
            for position in reveal(request.policy, eligible, confidence, entropy, step, size):
                row.put(position, picks[position])
            step += 1
        steps.append(step)
        start += size
    return Decoded(row.new()[0], steps)
