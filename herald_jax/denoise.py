"""One denoising decision: hidden states to (token, confidence, entropy), then a policy that says what to reveal.

Policies are small frozen callables, pytrees whose numbers are traced leaves: another threshold or number of steps does
not recompile (naming steps at all, instead of None, does once).
Shape letters: B batch, M block length, R rows of hidden states, E hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.errors import GenerationError
from herald_jax.fields import FLOAT32_MOST, MOST, real, whole
from pallas_kernels.head import head_statistics

# Rows given to the head at once. Its kernel goes through the vocabulary in pieces and holds no logits at all; where
# they are held, under sampling and away from the GPU, [HEAD_ROWS, V] float32 is 155 MB at V = 152k.
HEAD_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the head says of each row of hidden states.

    Attributes:
      token: i32[..., ] the chosen id.
      confidence: f32[...] its probability under the raw softmax (no temperature, no top-k or top-p).
      entropy: f32[...] of the raw softmax, in nats.
    """

    token: jax.Array
    confidence: jax.Array
    entropy: jax.Array


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits. The flags are static (they choose the program), the numbers are traced."""

    temperature: Any
    top_p: Any
    top_k: int
    greedy: bool
    nucleus: bool

    @classmethod
    def of(cls, temperature: float, top_k: int, top_p: float) -> Sampling:
        greedy = bool(temperature < np.finfo(np.float32).tiny)  # 0, or what float32 cannot divide by
        nucleus = max(float(top_p), float(np.finfo(np.float32).tiny))  # 0 in float32 would let no token in
        return cls(float(temperature), nucleus, 0 if greedy else top_k, greedy, not greedy and top_p < 1)


def draw(logits: jax.Array, keys: jax.Array | None, sampling: Sampling, greedy: jax.Array | None = None) -> jax.Array:
    """Ids i32[R] from float32 logits `[R, V]`, one typed PRNG key per row (None when sampling is greedy).

    Temperature 0 is argmax (lowest id on ties). Otherwise the Gumbel-max trick on logits / temperature, restricted to
    the top_k largest and then to the smallest set whose probability reaches top_p; each row on its own. Rows flagged in
    `greedy` (bool[R]) take the argmax whatever the temperature.
    """
    if sampling.greedy or keys is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature  # never above 0: no overflow
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = jax.lax.top_k(scaled, sampling.top_k)[0][:, -1:]
        scaled = jnp.where(scaled < kth, -jnp.inf, scaled)
    if sampling.nucleus:
        ordered = jnp.sort(scaled, axis=-1, descending=True)
        probs = jax.nn.softmax(ordered, axis=-1)
        inside = jnp.cumsum(probs, axis=-1) - probs < sampling.top_p  # mass before this token: the first is always in
        last = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
        scaled = jnp.where(scaled < last, -jnp.inf, scaled)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
    noisy = scaled + noise if greedy is None else jnp.where(greedy[:, None], logits, scaled + noise)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def _predict_rows(
    hidden: jax.Array,
    keys: jax.Array | None,
    greedy: jax.Array | None,
    *,
    kernel: jax.Array,
    sampling: Sampling,
    implementation: str | None,
    spared: int,
) -> Prediction:
    if sampling.greedy or keys is None:
        found = head_statistics(hidden, kernel, implementation=implementation, spared=spared)
        entropy = jnp.log(found.total) - found.weighted / found.total
        return Prediction(found.token, 1 / found.total, entropy)  # the largest logit's own weight is exp(0)
    precision = "highest" if kernel.dtype == jnp.float32 else None
    logits = jnp.einsum("re,ve->rv", hidden, kernel, preferred_element_type=jnp.float32, precision=precision)
    token = draw(logits, keys, sampling, greedy)
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - top[:, 0]
    entropy = jnp.log(total) - jnp.sum(jnp.where(weights > 0, weights * (logits - top), 0.0), axis=-1) / total
    return Prediction(token, jnp.exp(chosen) / total, entropy)


def predict(
    hidden: jax.Array,
    kernel: jax.Array,
    sampling: Sampling,
    keys: jax.Array | None = None,
    greedy: jax.Array | None = None,
    *,
    implementation: str | None = "xla",
    spared: int = 0,
) -> Prediction:
    """Run the vocabulary head `kernel` [V, E] over `hidden` [B, T, E]; every field of the result is `[B, T]`.

    `keys` are typed PRNG keys `[B, T]` (None: greedy), `greedy` bool[B, T] as in `draw`. At most HEAD_ROWS rows of
    float32 logits exist at a time, and none where greedy sampling has a kernel: `implementation` and `spared` are
    `head_statistics`', None on one device only. A NaN among a row's logits makes its confidence NaN.
    """
    batch, length, _ = hidden.shape
    rows = batch * length
    parts: tuple[Any, ...] = jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), (hidden, keys, greedy))
    predict_rows = functools.partial(
        _predict_rows, kernel=kernel, sampling=sampling, implementation=implementation, spared=spared
    )

    def some(index: jax.Array) -> Prediction:
        hidden, keys, greedy = jax.tree.map(lambda x: x[index], parts)
        return predict_rows(hidden, keys, greedy)

    if rows <= HEAD_ROWS:
        result = predict_rows(*parts)
    else:
        padded = -(-rows // HEAD_ROWS) * HEAD_ROWS
        index = jnp.minimum(jnp.arange(padded), rows - 1)
        result = jax.lax.map(some, index.reshape(-1, HEAD_ROWS))
    return jax.tree.map(lambda x: x.reshape(-1)[:rows].reshape(batch, length), result)


def schedule(step: jax.Array, block_length: int, steps: int | None) -> jax.Array:
    """How many positions step `step` (i32[B]) must reveal: block_length over `steps`, the first ones taking the rest.

    None means one per step. Past the last scheduled step (sub-blocks can need more) the smaller share goes on.
    """
    wanted = block_length if steps is None else jnp.minimum(steps, block_length)
    base, extra = block_length // wanted, block_length % wanted
    return jnp.where(step < extra, base + 1, base)


def _ranks(order: jax.Array, eligible: jax.Array) -> jax.Array:
    """Rank of each eligible position by `order` [B, M], largest first, ties to the lower index; i32[B, M]."""
    index = jnp.arange(order.shape[-1])
    a, b = order[:, :, None], order[:, None, :]
    before = (b > a) | ((b == a) & (index[None, None, :] < index[None, :, None]))
    return jnp.sum(before & eligible[:, None, :], axis=-1)


# As a pytree a policy is also built from tracers, arrays, shapes and placeholders, so that only these are judged by it;
# the rest where it becomes part of a request (`of_numbers`).
_JUDGED = (int, float, complex, str, bytes, np.generic)


def _check_number(policy: object, name: str, number: Callable[[Any], Any], most: float, message: str) -> None:
    """`policy.name` becomes what `number` makes of it, from 0 to `most`, or is refused with `message`."""
    value = getattr(policy, name)
    if not isinstance(value, _JUDGED):
        return
    found = number(value)
    if found is None or not 0 <= found <= most:
        raise GenerationError(message.format(repr(value)))
    # Of one type always: 1 and 1.0 are one value, but as traced arguments two types, that is two compiled programs.
    object.__setattr__(policy, name, found)


def _steps(value: Any) -> int | None:
    return whole(value) or None


def _check_steps(policy: object) -> None:
    expected = f"a positive number of steps per block, at most {MOST}, or None for one each"
    _check_number(policy, "steps", _steps, MOST, f"steps is {{}}, but must be {expected}")


@dataclasses.dataclass(frozen=True)
class StaticLowConfidence:
    """Reveal a fixed number of the most confident positions per step, so that a block takes `steps` steps.

    SDAR's `low_confidence_static`. steps=None reveals one position per step.
    """

    steps: Any = None

    def __post_init__(self) -> None:
        _check_steps(self)

    def __call__(
        self, *, eligible: jax.Array, confidence: jax.Array, entropy: jax.Array, step: jax.Array, block_length: int
    ) -> jax.Array:
        count = schedule(step, block_length, self.steps)[:, None]
        return eligible & (_ranks(confidence, eligible) < count)


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Reveal every position whose confidence exceeds `threshold`, or the scheduled number of best ones if that is more.

    With steps=None at least the best one is revealed: Fast-dLLM v2's rule, and SDAR's `low_confidence_dynamic` at one
    step per position. The comparison is strict, as in both families' published code.
    """

    threshold: Any = 0.9
    steps: Any = None

    def __post_init__(self) -> None:
        _check_steps(self)
        expected = "a probability between 0 and 1 was expected"
        _check_number(self, "threshold", real, 1, f"threshold is {{}}, but {expected}")

    def __call__(
        self, *, eligible: jax.Array, confidence: jax.Array, entropy: jax.Array, step: jax.Array, block_length: int
    ) -> jax.Array:
        count = schedule(step, block_length, self.steps)[:, None]
        sure = eligible & (confidence > self.threshold)
        best = eligible & (_ranks(confidence, eligible) < count)
        return jnp.where(jnp.sum(sure, axis=-1, keepdims=True) >= count, sure, best)


@dataclasses.dataclass(frozen=True)
class EntropyBound:
    """Reveal positions in ascending entropy while their sum (nats) stays below `bound`, at least the scheduled number.

    What SDAR's `entropy_bounded` sets out to do (its published code sums over the wrong axis).
    """

    bound: Any = 0.35
    steps: Any = None

    def __post_init__(self) -> None:
        _check_steps(self)
        expected = "a number of nats from 0 up was expected"
        _check_number(self, "bound", real, FLOAT32_MOST, f"entropy bound is {{}}, but {expected}")

    def __call__(
        self, *, eligible: jax.Array, confidence: jax.Array, entropy: jax.Array, step: jax.Array, block_length: int
    ) -> jax.Array:
        rank = _ranks(-entropy, eligible)
        no_later = eligible[:, None, :] & (rank[:, None, :] <= rank[:, :, None])
        total = jnp.sum(jnp.where(no_later, entropy[:, None, :], 0.0), axis=-1)
        count = schedule(step, block_length, self.steps)[:, None]
        return eligible & ((total < self.bound) | (rank < count))


@dataclasses.dataclass(frozen=True)
class Sequential:
    """Reveal the scheduled number of leftmost masked positions: SDAR's `sequential`."""

    steps: Any = None

    def __post_init__(self) -> None:
        _check_steps(self)

    def __call__(
        self, *, eligible: jax.Array, confidence: jax.Array, entropy: jax.Array, step: jax.Array, block_length: int
    ) -> jax.Array:
        count = schedule(step, block_length, self.steps)[:, None]
        return eligible & (jnp.cumsum(eligible, axis=-1) <= count)


@dataclasses.dataclass(frozen=True)
class Editing:
    """LLaDA2.1's token editing: what a block already holds is corrected while it is still being denoised.

    Beside the masked positions that `fill` reveals, a step rewrites every position of the block behind the prompt whose
    prediction is another token, with a confidence above `threshold`. When no mask is left the block goes on being
    read, at most `max_post_steps` + 1 times, until nothing is rewritten any more; only then is it final. (A forward
    that rewrites nothing has written the block's final K and V: it is the commit.)

    Attributes:
      fill: the policy for masked positions.
      threshold: 0 rewrites whatever disagrees, as in SGLang and the checkpoints' own code. (diffusers takes 0 to mean
        no editing: for that, use `fill` alone.)
      max_post_steps: see above; 16 in every published sampler.

    Sources: LLaDA2.1's report, equations 1 to 3; diffusers' BlockRefinementScheduler and LLaDA2Pipeline.
    """

    fill: StaticLowConfidence | Threshold | EntropyBound | Sequential = Threshold(0.95)
    threshold: Any = 0.9
    max_post_steps: Any = 16

    def __post_init__(self) -> None:
        if self.fill is None or isinstance(self.fill, (*_JUDGED, list, tuple, dict, type, Editing)):
            _refuse_fill(self.fill)
        expected = "a probability between 0 and 1 was expected; to switch editing off use the fill policy alone"
        _check_number(self, "threshold", real, 1, f"editing threshold is {{}}, but {expected}")
        expected = f"a number of steps from 0 up, at most {MOST}"
        _check_number(self, "max_post_steps", whole, MOST, f"max_post_steps is {{}}, but must be {expected}")

    def __call__(
        self, *, eligible: jax.Array, confidence: jax.Array, entropy: jax.Array, step: jax.Array, block_length: int
    ) -> jax.Array:
        return self.fill(
            eligible=eligible, confidence=confidence, entropy=entropy, step=step, block_length=block_length
        )

    def rewrite(self, *, editable: jax.Array, changed: jax.Array, confidence: jax.Array, post: jax.Array) -> jax.Array:
        """Which positions bool[B, M] are rewritten: `editable` ones whose prediction `changed`.

        `post` i32[B] counts the forwards that the block has had without masks.
        """
        return editable & changed & (confidence > self.threshold) & (post <= self.max_post_steps)[:, None]


POLICIES = (StaticLowConfidence, Threshold, EntropyBound, Sequential, Editing)
Policy = StaticLowConfidence | Threshold | EntropyBound | Sequential | Editing


def _refuse_fill(fill: object) -> NoReturn:
    given = "Editing(...)" if isinstance(fill, Editing) else repr(fill)
    raise GenerationError(f"fill is {given}, but must be the policy that reveals masked positions: Threshold(0.95)")


def of_numbers(policy: Policy) -> Policy:
    """`policy` for a request: what it holds are numbers, and arrays without axes become such.

    Raises GenerationError where it holds something else, as only a policy that JAX makes on its way may.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if field.name == "fill":
            value = of_numbers(value) if isinstance(value, POLICIES) else _refuse_fill(value)
        elif isinstance(value, (np.ndarray, jax.Array)) and value.shape == ():
            value = value.item()
        elif not (isinstance(value, (int, float)) or (value is None and field.name == "steps")):
            raise GenerationError(f"{field.name} of {type(policy).__name__} is {value!r}, but a number was expected")
        values[field.name] = value
    return type(policy)(**values)


for _cls, _data, _meta in (
    (Prediction, ["token", "confidence", "entropy"], []),
    (Sampling, ["temperature", "top_p"], ["top_k", "greedy", "nucleus"]),
    (StaticLowConfidence, ["steps"], []),
    (Threshold, ["threshold", "steps"], []),
    (EntropyBound, ["bound", "steps"], []),
    (Sequential, ["steps"], []),
    (Editing, ["fill", "threshold", "max_post_steps"], []),
):
    jax.tree_util.register_dataclass(_cls, data_fields=_data, meta_fields=_meta)
