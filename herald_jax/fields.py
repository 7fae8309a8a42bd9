"""Numbers that a user writes into a field: Python's own, or NumPy's, which become Python's."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from herald_jax.errors import GenerationError

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


def ask(condition: bool, message: str) -> None:
    """Raises GenerationError with `message` unless `condition` holds."""
    if not condition:
        raise GenerationError(message)
