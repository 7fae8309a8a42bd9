"""What a request may hold: whatever else is written into a field is refused there, in a sentence, not in a trace."""

from __future__ import annotations

import dataclasses
import fractions
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import herald_jax
from herald_jax import GenerationError
from herald_jax.denoise import POLICIES, Sampling, draw
from tests.herald_jax import tiny

# What is written here is wrong by its types, too.
Editing: Any = herald_jax.Editing
EntropyBound: Any = herald_jax.EntropyBound
GenerateConfig: Any = herald_jax.GenerateConfig
Herald: Any = herald_jax.Herald
Mage: Any = herald_jax.Mage
Sequential: Any = herald_jax.Sequential
Static: Any = herald_jax.StaticLowConfidence
Threshold: Any = herald_jax.Threshold
generate: Any = herald_jax.generate

ODD: dict[str, Any] = {
    "None": None, "text": "x", "bytes": b"4", "True": True, "False": False, "minus": -1, "share": -0.5,
    "nan": float("nan"), "inf": float("inf"), "huge": 10**400, "long": 10**30, "f64": 1e300, "complex": 1j,
    "fraction": fractions.Fraction(1, 2), "list": [1], "tuple": (1.5, 2), "dict": {"a": 1}, "class": Threshold,
    "policy": Threshold(0.5), "object": object(), "np-nan": np.float32("nan"), "np-bool": np.bool_(True),
    "np-minus": np.int64(-1), "np-text": np.str_("x"), "array": np.array([1, 2]), "point": np.array(4),
    "jax": jnp.float32(0.5), "jax-minus": jnp.int32(-1), "jax-nan": jnp.float32("nan"), "jax-array": jnp.array([1, 2]),
}  # fmt: skip
# What of these makes sense where. Every other one is refused.
FITS = {
    "steps": {"None", "point"}, "threshold": {"jax"}, "bound": {"long", "point", "jax"},
    "max_post_steps": {"point"}, "fill": {"policy"},
    "max_new_tokens": {"huge", "long"}, "policy": {"policy"}, "temperature": {"long"}, "top_k": {"huge", "long"},
    "top_p": set(), "seed": {"minus", "np-minus"}, "stop_token_ids": {"None", "list", "array", "jax-array"},
    "ignore_stop": {"True", "False", "np-bool"}, "block_cache": {"True", "False", "np-bool"},
    "prefill_chunk": {"huge", "long"}, "room": set(),
    "page_size": {"None"}, "reselect_layers": {"None"}, "layer_spread": {"inf", "long"}, "keep_bonus": {"None"},
    "measure": {"True", "False", "np-bool"}, "draft": {"True", "False", "np-bool"},
    "reuse": {"True", "False", "np-bool"},
}  # fmt: skip


def made(cls: Any, **fields: Any) -> Any:
    """What `generate` gets: a policy comes to it in a request."""
    found = cls(**fields)
    return GenerateConfig(policy=found).policy if cls in POLICIES else found


@pytest.mark.parametrize("cls", [*POLICIES, GenerateConfig, Mage, Herald])
def test_an_odd_value_is_refused_where_it_is_written(cls: Any) -> None:
    wrong = []
    for field in dataclasses.fields(cls):
        for name, value in ODD.items():
            fits = FITS.get(field.name, set()) - ({name} if (cls, field.name) == (Herald, "page_size") else set())
            try:
                made(cls, **{field.name: value})
                refused = False
            except GenerationError as error:
                refused = True
                if field.name.split("_")[0] not in str(error).lower() or "\n" in str(error):
                    wrong.append(f"{field.name}={name}: {error}")
            if refused != (name not in fits):
                wrong.append(f"{field.name}={name} is {'refused' if refused else 'taken'}")
    assert wrong == []


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Editing(0.5), "fill is 0.5, but must be the policy that reveals masked positions: Threshold(0.95)"),
        (lambda: Editing(np.float32(0.5)), "but must be the policy that"),
        (lambda: Editing(None), "fill is None, but must be the policy"),
        (lambda: Editing(Threshold), "fill is <class 'herald_jax.denoise.Threshold'>, but must be"),
        (lambda: Threshold(True), "threshold is True, but a probability between 0 and 1"),
        (lambda: Threshold(np.float32("nan")), "but a probability between 0 and 1"),
        (lambda: Sequential(np.int64(0)), "but must be a positive number of steps"),
        (lambda: Static(10**30), f"steps is {10**30}, but must be a positive number of steps per block, at most"),
        (lambda: EntropyBound(1e300), "entropy bound is 1e+300, but"),
        (lambda: Mage(selector="tidal", reselect_layers=(1, "2")), "reselect_layers is (1, '2'), but must be layers"),
        (lambda: Herald(draft=1), "draft is 1, but must be True or False"),
        (lambda: Herald(keep_bonus=1e30), "keep_bonus is 1e+30, but must be a finite number"),
        (lambda: GenerateConfig(stop_token_ids=5), "stop_token_ids is 5, but must be token ids, as (2, 7), or None"),
        (lambda: GenerateConfig(policy=Threshold(None)), "threshold of Threshold is None, but a number was expected"),
    ],
)  # fmt: skip
def test_refusals_at_once(make: Any, sentence: str) -> None:
    with pytest.raises(GenerationError, match=re.escape(sentence)):
        make()


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (Threshold(np.float32(0.5), np.int64(4)), Threshold(0.5, 4)),
        (EntropyBound(np.int32(1), np.uint8(2)), EntropyBound(1.0, 2)),
        (Editing(Sequential(np.int64(2)), np.float64(0.5), np.int8(3)), Editing(Sequential(2), 0.5, 3)),
        (
            GenerateConfig(
                max_new_tokens=np.int64(4), policy=Threshold(jnp.float32(0.5), np.array(4)), temperature=np.float32(1),
                top_k=np.int32(3), top_p=np.float32(0.5), seed=np.int64(-7), stop_token_ids=np.array([3, 4]),
                ignore_stop=np.bool_(True), prefill_chunk=np.uint16(32), room=np.int64(0),
            ),
            GenerateConfig(
                max_new_tokens=4, policy=Threshold(0.5, 4), temperature=1.0, top_k=3, top_p=0.5, seed=-7,
                stop_token_ids=(3, 4), ignore_stop=True, prefill_chunk=32, room=0,
            ),
        ),
        (
            Mage(
                budget=np.float32(0.25), dense_layers=np.int64(1), min_budget=np.int32(4), page_size=np.int64(2),
                layer_spread=np.float64(2), measure=np.bool_(False),
            ),
            Mage(budget=0.25, dense_layers=1, min_budget=4, page_size=2, layer_spread=2.0, measure=False),
        ),
        (
            Mage(budget=np.int64(32), selector=np.str_("tidal"), reselect_layers=np.array([2, 4]).tolist()),
            Mage(budget=32, selector="tidal", reselect_layers=(2, 4)),
        ),
        (
            Herald(
                budget=np.int16(32), draft_at=np.float32(0.25), index_bits=np.int64(4), split=np.float64(1),
                draft=np.bool_(True), keep_bonus=np.float32(0.5),
            ),
            Herald(budget=32, draft_at=0.25, index_bits=4, split=1.0, draft=True, keep_bonus=0.5),
        ),
    ],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_numbers_of_numpy_are_those_of_python(given: Any, plain: Any) -> None:
    assert given == plain
    assert repr(given) == repr(plain)  # of the same types, too
    assert hash(given) == hash(plain)


@pytest.mark.parametrize("cls", [Mage, Herald])
def test_a_budget_of_one_entry_is_not_one_of_everything(cls: Any) -> None:
    """1 == 1.0, and plans name compiled programs: one ran for both, where their pools had the same size."""
    one, whole = (cls(budget, min_budget=1, dense_layers=0) for budget in (1, 1.0))
    assert one != whole
    assert one == cls(1, min_budget=1, dense_layers=0)
    assert hash(one) == hash(cls(1, min_budget=1, dense_layers=0))
    assert one != Threshold()
    if cls is Mage:
        model, prompts = tiny.model(tiny.SDAR), tiny.prompts([30, 41])
        request = GenerateConfig(max_new_tokens=8, ignore_stop=True)
        written = [generate(model, prompts, request, plan).tokens for plan in (one, whole, None)]
        assert written[0] != written[1] == written[2]


def test_a_policy_of_jax_may_hold_anything() -> None:
    """Tracers, shapes, placeholders, batches: policies are pytrees."""
    policy = Editing(Threshold(0.5, 4), 0.5, 3)
    for leaf in (object(), jax.ShapeDtypeStruct((), jnp.float32), jnp.ones(3), np.ones(3), None):
        again = jax.tree.map(lambda _, leaf=leaf: leaf, policy)
        assert isinstance(again, Editing)
        assert again.fill.threshold is leaf
    twice = jax.jit(lambda policy: jax.tree.map(lambda x: 2 * x, policy))(policy)
    assert GenerateConfig(policy=dataclasses.replace(twice, threshold=0.5)).policy == Editing(Threshold(1.0, 8), 0.5, 6)


def test_numpy_numbers_write_what_pythons_do() -> None:
    model, prompts = tiny.model(tiny.SDAR), tiny.prompts([7])
    request = GenerateConfig(max_new_tokens=8, policy=Threshold(0.5, 2), temperature=1.0, top_k=5)
    given = GenerateConfig(
        max_new_tokens=np.int64(8),
        policy=Threshold(np.float32(0.5), np.int64(2)),
        temperature=np.float32(1),
        top_k=np.int64(5),
    )
    assert generate(model, prompts, given).tokens == generate(model, prompts, request).tokens


def test_the_smallest_nucleus_holds_one_token() -> None:
    """A top_p that float32 takes for 0, or that the device flushes to 0, used to let no token in: id 0 was written."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 20)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 6)
    best = np.asarray(jnp.argmax(logits, axis=-1)).tolist()
    assert 0 not in best
    for top_p in (1e-300, 1e-40, 1e-37):
        assert np.asarray(jax.jit(draw)(logits, keys, Sampling.of(1.0, 0, top_p))).tolist() == best


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"config": {"max_new_tokens": 4}}, "config is {'max_new_tokens': 4}, but must be GenerateConfig(...)"),
        ({"config": Threshold()}, "config is Threshold(threshold=0.9, steps=None), but must be GenerateConfig(...)"),
        ({"config": GenerateConfig(4, room=1000)}, "room is 1000, but the model's context is 512 tokens"),
        ({"plan": {}}, "plan is {}, but must be Dense(), Mage(...) or Herald(...)"),
        ({"keys": 3}, "keys are 3, but one typed key per prompt, [1], was expected"),
        ({"prompts": 3}, "prompts is 3, but a list of prompts was expected"),
        ({"prompts": iter([[1]])}, "but a list of prompts was expected"),
        ({"prompts": [b"AB"]}, "prompt 0 is bytes, but must be a text or a list of token ids"),
    ],
)
def test_arguments_of_generate_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GenerationError, match=re.escape(sentence)):
        generate(tiny.model(tiny.SDAR), **{"prompts": [[1]]} | given)
