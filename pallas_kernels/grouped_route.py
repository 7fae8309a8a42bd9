"""Which experts a token goes to, as one per-thread kernel (`lanes`): a warp per token, its experts in registers.

The plain form is `herald_jax.moe.route`, half a dozen small launches in each layer of a denoising step. Choices are by
unsigned keys of the same order as the numbers, so that 0 stands for what may not be chosen.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.warps import WARP, halves, merged

__all__ = ["Choice", "choose_experts"]

_THREADS = 128
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Choice:
    """How experts are chosen; see `herald_jax.config.MoEConfig`, whose fields these are.

    Attributes:
        k: experts per token.
        softmax: scores are a softmax's, else sigmoids.
        renormalise: weights are divided by their sum.
        scaling: factor on the weights.
        groups, groups_per_token: of equal size; 1 and 1 are none.
    """

    k: int
    softmax: bool
    renormalise: bool
    scaling: float
    groups: int
    groups_per_token: int


def choose_experts(
    logits: jax.Array, bias: jax.Array | None, *, choice: Choice, launch: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Weights f32[R, k] and experts i32[R, k], best first, the lower number wins a tie: of logits f32[R, X].

    bias: f32[X] or None, added to the scores for choosing only. X is a multiple of 128, and of 32 times the groups'
    number divided by it (`dispatch.choose_experts_missing`).
    """
    if launch is None:
        from pallas_kernels import lanes  # Mosaic GPU is imported only where a kernel is built

        launch = lanes.launch
    rows, experts = logits.shape
    per = experts // WARP  # consecutive experts of each lane
    blocks = -(-rows * WARP // _THREADS)

    def kernel(lanes: Any, logits_ref: Any, *rest: Any) -> None:
        *bias_ref, weights_ref, experts_ref = rest
        lane = lanes.thread & (WARP - 1)
        row = lanes.block * (_THREADS // WARP) + lanes.thread // WARP
        inside = row < rows
        mine = lane * per
        words = [w for i in range(0, per, 4) for w in lanes.load(logits_ref, row * experts + mine + i, 4, where=inside)]
        scores = _scores(lanes, [lanes.real(word) for word in words], lane, choice)
        chances = scores
        if bias_ref:
            words = [w for i in range(0, per, 4) for w in lanes.load(bias_ref[0], mine + i, 4)]
            chances = [score + lanes.real(word) for score, word in zip(scores, words, strict=True)]
        keys = [_key(lanes, chance) for chance in chances]
        if choice.groups > 1:
            keys = _within_groups(lanes, keys, lane, choice)
        numbers, chosen = [], []
        for _ in range(choice.k):
            at = _best(lanes, keys, lane, mine)
            place = at % per
            score = lanes.bits(scores[0])
            for i in range(1, per):
                score = lanes.where(place == i, lanes.bits(scores[i]), score)
            numbers.append(lanes.real(lanes.shuffle(score, at // per)))
            chosen.append(at)
            keys = [lanes.where(at == mine + i, lanes.constant(0), key) for i, key in enumerate(keys)]
        if choice.renormalise:
            total = numbers[0]
            for number in numbers[1:]:
                total = total + number
            # As in the plain form: a sum of sigmoids can underflow.
            total = total + 1e-20
            numbers = [lanes.divide(number, total) for number in numbers]
        weight, expert = lanes.constant(0), lanes.constant(0)
        for i, (number, at) in enumerate(zip(numbers, chosen, strict=True)):
            weight = lanes.where(lane == i, lanes.bits(number * choice.scaling), weight)
            expert = lanes.where(lane == i, at, expert)
        out, writes = row * choice.k + lane, inside & (lane < choice.k)
        lanes.store(weights_ref, out, [weight], where=writes)
        lanes.store(experts_ref, out, [expert], where=writes)

    of = jax.ShapeDtypeStruct
    weights, experts_of = launch(
        kernel,
        name="choose_experts",
        blocks=blocks,
        threads=_THREADS,
        inputs=[logits] + ([] if bias is None else [bias]),
        outputs=[of((rows, choice.k), jnp.float32), of((rows, choice.k), jnp.int32)],
    )
    return weights, experts_of


def _scores(lanes: Any, logits: list[Any], lane: Any, choice: Choice) -> list[Any]:
    """Each lane's scores, from its logits."""
    if not choice.softmax:
        one = lanes.real(lanes.constant(0x3F800000))
        return [lanes.divide(one, lanes.exp2(logit * -_LOG2_E) + 1.0) for logit in logits]
    top = logits[0]
    for logit in logits[1:]:
        top = lanes.maximum(top, logit)
    top = merged(lanes, top, lanes.maximum, halves())
    parts = [lanes.exp2((logit - top) * _LOG2_E) for logit in logits]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    total = merged(lanes, total, operator.add, halves())
    return [lanes.divide(part, total) for part in parts]


def _key(lanes: Any, number: Any) -> Any:
    """An unsigned word of the same order as the number, never 0."""
    bits = lanes.bits(number)
    return bits ^ (lanes.sign(bits) | 0x80000000)


def _number(lanes: Any, key: Any) -> Any:
    """Inverse of `_key`."""
    return lanes.real(key ^ (~lanes.sign(key) | 0x80000000))


def _larger(lanes: Any, a: Any, b: Any) -> Any:
    return lanes.where(a < b, b, a)


def _within_groups(lanes: Any, keys: list[Any], lane: Any, choice: Choice) -> list[Any]:
    """The keys, 0 outside each token's best groups: those whose two best have the largest sum."""
    first, second = keys[0], lanes.constant(0)
    for key in keys[1:]:
        second = _larger(lanes, second, lanes.minimum(first, key))
        first = _larger(lanes, first, key)
    width = WARP // choice.groups  # lanes of a group
    distance = width // 2
    while distance:
        other_first, other_second = (lanes.shuffle(x, lane ^ distance) for x in (first, second))
        second = _larger(lanes, lanes.minimum(first, other_first), _larger(lanes, second, other_second))
        first = _larger(lanes, first, other_first)
        distance //= 2
    sums = _key(lanes, _number(lanes, first) + _number(lanes, second))
    better = lanes.constant(0)
    for group in range(choice.groups):
        other = lanes.shuffle(sums, lanes.constant(group * width))
        earlier = lane >= (group + 1) * width  # than this lane's own group
        better = better + lanes.word((sums < other) | ((sums == other) & earlier))
    return [lanes.where(better < choice.groups_per_token, key, lanes.constant(0)) for key in keys]


def _best(lanes: Any, keys: list[Any], lane: Any, mine: Any) -> Any:
    """The number of the expert with a warp's largest key, the lowest of several, in all lanes."""
    best, at = keys[0], mine
    for i, key in enumerate(keys[1:], 1):
        better = best < key
        best, at = lanes.where(better, key, best), lanes.where(better, mine + i, at)
    for distance in (16, 8, 4, 2, 1):
        other, there = lanes.shuffle(best, lane ^ distance), lanes.shuffle(at, lane ^ distance)
        better = (best < other) | ((best == other) & (there < at))
        best, at = lanes.where(better, other, best), lanes.where(better, there, at)
    return at
