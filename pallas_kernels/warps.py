"""What the kernels of single threads (`lanes`, or its NumPy twin) do with a warp's threads together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

WARP = 32


def halves(width: int = WARP) -> list[int]:
    """The distances at which `merged` goes over runs of `width` lanes, a power of two: half of them first."""
    return [width >> i for i in range(1, width.bit_length())]


def merged(lanes: Any, number: Any, merge: Callable[[Any, Any], Any], distances: Iterable[int]) -> Any:
    """`number` merged over the lanes whose numbers differ in the bits of `distances`, one after the other; in all."""
    lane = lanes.thread & (WARP - 1)
    for distance in distances:
        number = merge(number, lanes.real(lanes.shuffle(lanes.bits(number), lane ^ distance)))
    return number
