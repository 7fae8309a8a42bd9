"""Block-diffusion decoding restated over plain `transformers` models: slow, cache-free, one prompt at a time.

These functions are the oracle of `herald_jax.generate`. They say what the published samplers compute (JetAstra/SDAR
`generate.py`; Fast-dLLM v2's `generate`, as vendored with its checkpoints) in the plainest form there is: every
denoising step is one full pass over prompt + finished blocks + current block under a 4-D block-causal mask, with
nothing remembered between steps. The one exception is Fast-dLLM v2's sub-block cache, whose whole point is to remember:
there the keys and values outside the current small block are those of the last full-block pass, so they are kept and
handed back.

Where the published code is wrong, what it means is restated and not what it does:

* Masks are tracked by position. Both published samplers look for `x == mask_id`, so a mask token typed into the prompt
  is denoised as if it were a hole.
* Temperature 0 is the argmax with the probability of the *raw* softmax. SDAR divides by zero at temperature 0 and takes
  its confidence after top-k filtering, which makes every confidence 1.0 for top_k=1.
* A step never reveals more positions than are masked. SDAR's static rule (and the fallback of its dynamic one) takes
  the top n of a list that holds -inf for known positions, and so overwrites prompt tokens once fewer than n masks are
  left.
* Entropy is that of the whole distribution at a position. SDAR's branch sums over the block axis of the chosen tokens'
  probabilities and never defines its index.
* A prompt of exactly one block is prefilled like any other whole number of blocks. Fast-dLLM v2 tests
  `length > block_size`, so it loses a prompt of `block_size` tokens and denoises a block that has no seed.
* Generation ends with the row's own first stop token (that token included), or after exactly `max_new_tokens`. SDAR
  returns the whole padded canvas; Fast-dLLM v2 looks at row 0 only and counts blocks, not tokens.
* Whether the sub-block cache is refreshed depends on this row alone; the published batch form refreshes all rows as
  soon as one needs it, which makes a row's tokens depend on its neighbours.

Every decision's distance from going the other way is recorded (`Margins`), so that the landed values can be chosen such
that float32 rounding cannot change them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from tests.oracles.cases import Policy


@dataclasses.dataclass
class Margins:
    """The narrowest decision of a decode.

    `token`: least distance between the best and the second logit where a token was taken. `reveal`: least distance, in
    the policy's own measure (probability, or nats of entropy), between a position revealed and one left, or from the
    bound.
    """

    token: float = math.inf
    reveal: float = math.inf


@dataclasses.dataclass
class Decode:
    """Result of one prompt.

    `tokens`: the new tokens. `written`: every token decided behind the prompt, also those that the end cuts off.
    `passes`: denoising passes until `tokens` could not change any more. `margins`: how narrow the decisions were.
    """

    tokens: list[int]
    written: list[int]
    passes: int
    margins: Margins


def block_causal_mask(queries: torch.Tensor, keys: torch.Tensor, block_length: int) -> torch.Tensor:
    """Additive mask f32[1, 1, Q, K] from absolute positions: a query sees every key of its own and earlier blocks."""
    seen = (queries[:, None] // block_length) >= (keys[None, :] // block_length)
    mask = torch.zeros(seen.shape, dtype=torch.float32)
    mask[~seen] = torch.finfo(torch.float32).min
    return mask[None, None]


@torch.no_grad()
def full_logits(model: PreTrainedModel, ids: Sequence[int], block_length: int) -> torch.Tensor:
    """Logits f32[N, V] of one block-causal pass over all of `ids`."""
    positions = torch.arange(len(ids))
    mask = block_causal_mask(positions, positions, block_length)
    out = model(torch.tensor([list(ids)]), attention_mask=mask, position_ids=positions[None], use_cache=False)
    return out.logits[0]


class SubBlockPass:
    """Fast-dLLM v2's sub-block cache: one full pass, then passes over a small block against what that pass left."""

    def __init__(self, model: PreTrainedModel, block_length: int) -> None:
        self.model, self.block_length = model, block_length
        self.kept: DynamicCache | None = None

    @torch.no_grad()
    def full(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits f32[N, V] of a full pass whose keys and values are kept for `small`."""
        positions = torch.arange(len(ids))
        mask = block_causal_mask(positions, positions, self.block_length)
        self.kept = DynamicCache()
        out = self.model(
            torch.tensor([list(ids)]),
            attention_mask=mask,
            position_ids=positions[None],
            cache=self.kept,
            use_cache=True,
        )
        return out.logits[0]

    @torch.no_grad()
    def small(self, ids: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Logits f32[end - start, V] of ids[start:end] alone; everything outside it is as the last `full` pass saw it.

        Keys carry their rotary position already, so the order in which attention meets them does not matter: the small
        block's fresh keys are simply appended behind the kept ones of all other positions.
        """
        assert self.kept is not None, "a small pass follows a full pass"
        others = torch.cat([torch.arange(0, start), torch.arange(end, len(ids))])
        cache = DynamicCache()
        for index, layer in enumerate(self.kept.layers):
            cache.update(layer.keys[:, :, others], layer.values[:, :, others], index)
        mask = torch.zeros(1, 1, end - start, len(ids))
        out = self.model(
            torch.tensor([list(ids[start:end])]),
            attention_mask=mask,
            position_ids=torch.arange(start, end)[None],
            cache=cache,
            use_cache=True,
        )
        return out.logits[0]


def _take(logits: torch.Tensor, margins: Margins) -> int:
    """Argmax of one position's logits, lowest index first; the distance to the runner-up goes into `margins`."""
    best, second = torch.topk(logits, 2).values.tolist()
    margins.token = min(margins.token, best - second)
    return int(torch.argmax(logits))


def _ranked(scores: dict[int, float], count: int, margins: Margins) -> list[int]:
    """The `count` positions of highest score (ties to the lowest position) and the distance to the next one."""
    order = sorted(scores, key=lambda position: (-scores[position], position))
    if count < len(order):
        margins.reveal = min(margins.reveal, scores[order[count - 1]] - scores[order[count]])
    return order[:count]


def choose(policy: Policy, quota: int, logits: dict[int, torch.Tensor], margins: Margins) -> list[int]:
    """The positions a step reveals, out of the eligible masked positions that `logits` maps to f32[V]."""
    quota = min(quota, len(logits))
    probabilities = {position: torch.softmax(row, dim=-1) for position, row in logits.items()}
    confidence = {position: float(row.max()) for position, row in probabilities.items()}
    if policy.kind == "sequential":
        return sorted(logits)[:quota]
    if policy.kind == "static":
        return _ranked(confidence, quota, margins)
    if policy.kind == "threshold":
        assert policy.threshold is not None
        margins.reveal = min(margins.reveal, *(abs(value - policy.threshold) for value in confidence.values()))
        sure = [position for position, value in confidence.items() if value > policy.threshold]
        return sure if len(sure) >= quota else _ranked(confidence, quota, margins)
    if policy.kind == "entropy":
        assert policy.bound is not None
        entropy = {position: float(torch.special.entr(row).sum()) for position, row in probabilities.items()}
        total, count = 0.0, 0
        for value in sorted(entropy.values()):
            total += value
            margins.reveal = min(margins.reveal, abs(total - policy.bound))
            count += total < policy.bound
        return _ranked({position: -value for position, value in entropy.items()}, max(quota, count), margins)
    raise ValueError(f"unknown policy kind {policy.kind!r}")


@dataclasses.dataclass
class _Row:
    """One prompt on its way: ids so far, holes of the current block, and where it ends."""

    prompt: list[int]
    max_new_tokens: int
    stops: Sequence[int]
    ids: list[int] = dataclasses.field(init=False)
    masked: set[int] = dataclasses.field(default_factory=set)
    passes: int = 0
    margins: Margins = dataclasses.field(default_factory=Margins)

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)

    def open_block(self, block_length: int, mask_id: int) -> int:
        """Fill the block that holds the next position with masks; returns its end."""
        end = (len(self.ids) // block_length + 1) * block_length
        self.masked = set(range(len(self.ids), end))
        self.ids += [mask_id] * (end - len(self.ids))
        return end

    def reveal(self, policy: Policy, block_length: int, step: int, logits: dict[int, torch.Tensor]) -> None:
        """Take the tokens that `policy` takes at this step; `logits` maps each eligible hole to what predicts it."""
        for position in choose(policy, policy.quota(block_length, step), logits, self.margins):
            self.ids[position] = _take(logits[position], self.margins)
            self.masked.discard(position)
        self.passes += 1

    def tokens(self) -> list[int] | None:
        """The new tokens, ending with the first stop token, or None while a hole among them can still change them."""
        for position in range(len(self.prompt), len(self.prompt) + self.max_new_tokens):
            if position >= len(self.ids) or position in self.masked:
                return None
            if self.ids[position] in self.stops:
                return self.ids[len(self.prompt) : position + 1]
        return self.ids[len(self.prompt) : len(self.prompt) + self.max_new_tokens]

    def decode(self) -> Decode:
        """The finished row."""
        tokens = self.tokens()
        assert tokens is not None, "the row is not finished"
        written = [self.ids[p] for p in range(len(self.prompt), len(self.ids)) if p not in self.masked]
        return Decode(tokens, written, self.passes, self.margins)


def sdar(
    model: PreTrainedModel,
    prompt: Sequence[int],
    *,
    mask_id: int,
    block_length: int,
    policy: Policy,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
) -> Decode:
    """SDAR's sampler, greedy: the prompt's remainder opens the first canvas, logits belong to their own position.

    The published sampler completes the block that a stop token is in; what it adds is behind the stop token.
    """
    row = _Row(list(prompt), max_new_tokens, stop_ids)
    while row.tokens() is None:
        row.open_block(block_length, mask_id)
        step = 0
        while row.masked and row.tokens() is None:
            logits = full_logits(model, row.ids, block_length)
            row.reveal(policy, block_length, step, {position: logits[position] for position in row.masked})
            step += 1
    return row.decode()


def fast_dllm_v2(
    model: PreTrainedModel,
    prompt: Sequence[int],
    *,
    mask_id: int,
    block_length: int,
    small_block_length: int,
    policy: Policy,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    block_cache: bool = False,
) -> Decode:
    """Fast-dLLM v2's sampler, greedy: shifted logits, a seed token per block, small blocks from left to right.

    The token at position p is read from the logits of position p - 1 of the same block. Position 0 of a block therefore
    has no prediction of its own: it is the seed, taken from the last logits of the block before it once that is
    complete. The published sampler knows the threshold rule only; the other policies choose among the same eligible
    positions, the masks of the leftmost small block that has any.
    """
    row = _Row(list(prompt), max_new_tokens, stop_ids)
    while row.tokens() is None:
        if len(row.ids) % block_length == 0:
            row.ids.append(_take(full_logits(model, row.ids, block_length)[-1], row.margins))
        if row.tokens() is not None:
            break
        end = row.open_block(block_length, mask_id)
        passes = SubBlockPass(model, block_length)
        step = 0
        for low in range(end - block_length, end, small_block_length):
            small = range(low, low + small_block_length)
            while row.tokens() is None and (holes := row.masked & set(small)):
                if not block_cache:
                    logits, first = full_logits(model, row.ids, block_length), 0
                elif passes.kept is None or low in row.masked:
                    logits, first = passes.full(row.ids), 0
                else:  # `low` is known, so every hole has its predecessor inside the small block
                    logits, first = passes.small(row.ids, low, low + small_block_length), low
                row.reveal(policy, block_length, step, {position: logits[position - 1 - first] for position in holes})
                step += 1
    return row.decode()
