"""What is trained on next, and the compiled programs that train on it."""

from __future__ import annotations

import collections
import functools
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.reference_model import rows
from herald_jax import training

# Counting words is learned late and by other means; it does not hold the others up.
_RETRIEVAL = [i for i, name in enumerate(rows.NAMES) if name != "common_words"]


class Curriculum:
    """Which lengths to train on: the top level grows with what has been learned, and with time."""

    def __init__(self, shapes: tuple[rows.Shape, ...], level: int, *, advance_at: float):
        self._shapes, self._advance_at = shapes, advance_at
        self.most = max(i for i, size in enumerate(rows.LEVELS) if size <= shapes[-1].length)
        self.level = min(level, self.most)
        self._recent: collections.deque[np.ndarray] = collections.deque(maxlen=40)

    def add(self, counts: np.ndarray) -> None:
        """After a step, its counts f32[levels, tasks, 2]."""
        self._recent.append(counts)

    def accuracy(self, axis: int) -> dict[str, float]:
        """Share of wholly masked answers predicted right at once, by level (axis 0) or by task at the top level (1)."""
        if not self._recent:
            return {}
        total = np.sum(self._recent, axis=0)
        if axis == 0:
            pairs = zip(map(str, rows.LEVELS), total.sum(axis=1), strict=True)
        else:
            pairs = zip(rows.NAMES, total[self.level], strict=True)
        return {name: round(float(right / asked), 3) for name, (asked, right) in pairs if asked > 0}

    def stuck(self) -> bool:
        """Whether the first level is still the present one and its answers are wrong (common words apart)."""
        if self.level or not self._recent:
            return False
        asked, right = np.sum(self._recent, axis=0)[0][_RETRIEVAL].sum(axis=0)
        return bool(asked >= 150 and right / asked < 0.15)

    def update(self, done: float) -> bool:
        """Advance if it is time; `done` is the share of the run's time that has passed. Whether it did."""
        if self.level == self.most or not self._recent:
            return False
        asked, right = np.sum(self._recent, axis=0)[self.level][_RETRIEVAL].sum(axis=0)
        learned = asked >= 150 and right / asked >= self._advance_at
        # Late in the run the long lengths must have their turn, if retrieval works at all.
        late = asked >= 150 and right / asked >= 0.4 and done > 0.45 + 0.4 * self.level / max(self.most, 1)
        if learned or late:
            self.level += 1
            self._recent.clear()
        return learned or late

    def shape(self, step: int) -> rows.Shape:
        """The shape of a step: mostly the one that the top level needs, sometimes a shorter one."""
        wanted = rows.LEVELS[self.level]
        needed = next(i for i, shape in enumerate(self._shapes) if shape.length >= wanted)
        turn = step % 10
        return self._shapes[needed if turn < 7 else max(0, needed - (1 if turn < 9 else 2))]


class Programs:
    """The compiled steps, one a shape; the later ones compile in the background while the first trains."""

    def __init__(self, step: Any, state: training.TrainState, shapes: tuple[rows.Shape, ...], example: Any):
        like = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding))
        self._state = like(state)
        self._step, self._example = step, example
        self._ready: dict[rows.Shape, Any] = {}
        self._compile(shapes[0])
        self._rest = threading.Thread(target=self._compile_all, args=(shapes[1:],), daemon=True)
        self._rest.start()

    def _compile_all(self, shapes: tuple[rows.Shape, ...]) -> None:
        for shape in shapes:
            self._compile(shape)

    def _compile(self, shape: rows.Shape) -> None:
        started = time.perf_counter()
        lowered = self._step.lower(self._state, self._example(shape), jax.ShapeDtypeStruct((), jnp.float32))
        self._ready[shape] = lowered.compile()
        print(f"compiled {shape} in {time.perf_counter() - started:.0f} s", flush=True)

    def __contains__(self, shape: rows.Shape) -> bool:
        return shape in self._ready

    def __call__(self, shape: rows.Shape, *arguments: Any) -> Any:
        return self._ready[shape](*arguments)

    def wait(self) -> None:
        self._rest.join()
