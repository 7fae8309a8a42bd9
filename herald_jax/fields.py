"""Numbers that a user writes into a field: Python's own, or NumPy's, which become Python's."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import numpy as np

from herald_jax.errors import ConfigError, GenerationError

MOST = 10**9  # the largest whole number a field may hold: two of them together are an i32
FLOAT32_MOST = float(np.finfo(np.float32).max)


def whole(value: Any) -> int | None:
    """`value` as an int, or None if it is not a whole number by its type; a bool is none."""
    integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return operator.index(value) if integer else None


def real(value: Any) -> float | None:
    """`value` as a float, which may be NaN; None if it is no number, or more than a float32 can be."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    # Infinity stays what it is, but a number must not become one on its way to the device.
    return None if math.isfinite(number) and abs(number) > FLOAT32_MOST else number


def switch(value: Any) -> bool | None:
    """`value` as a bool, or None if it is none."""
    return bool(value) if isinstance(value, (bool, np.bool_)) else None


def ids(value: Any) -> tuple[int, ...] | None:
    """`value`'s elements as ints, or None if it has none or one of them is no whole number by its type; nor is text."""
    given = value.tolist() if hasattr(value, "tolist") else value  # of an array its elements as numbers
    if isinstance(given, (str, bytes)):
        return None
    try:
        numbers = [whole(number) for number in given]
    except TypeError:  # nothing that has elements
        return None
    found = tuple(number for number in numbers if number is not None)
    return found if len(found) == len(numbers) else None


_KINDS = {"int": (whole, "an integer"), "float": (real, "a number"), "bool": (switch, "True or False")}


def typed(owner: Any) -> None:
    """Check the numbers and switches among a dataclass' fields by their annotations, as a file may have others.

    NumPy's become Python's. Raises ConfigError, which names the field.
    """
    for one in dataclasses.fields(owner):
        kind, _, other = str(one.type).partition(" | ")
        value = getattr(owner, one.name)
        if kind not in _KINDS or (value is None and other == "None"):
            continue
        of, expected = _KINDS[kind]
        found = of(value)
        if found is None or not math.isfinite(found):
            raise ConfigError(f"{one.name} is {value!r}, but must be {expected}")
        object.__setattr__(owner, one.name, found)


def ask(condition: bool, message: str) -> None:
    """Raises GenerationError with `message` unless `condition` holds."""
    if not condition:
        raise GenerationError(message)
