"""Which values of mixtures of experts are recorded; needs neither torch, transformers nor diffusers.

The decodes are those of diffusers' LLaDA2Pipeline (its code, not a restatement), each prompt on its own; `MARGIN` is
how far from tipping over every decision is, so that float32 rounding (1e-5 in a logit here) cannot change a token.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np

DATA = pathlib.Path(__file__).parent / "moe_data"
MARGIN = 1e-3
VOCAB = 272
MASK = 259
BLOCK = 8
LOGITS_LENGTH = 24


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of prompts of LLaDA2's tiny checkpoint under one setting of the pipeline.

    Attributes:
      steps: the pipeline's num_inference_steps; one more than the block length plans one position a step and never
        ends a block early (with fewer, the pipeline skips the last edits of a block that took them all).
      editing: editing threshold, None = off. max_post_steps: as the pipeline's.
      stop: whether a token that the rows produce without it becomes the end-of-text id.
    """

    name: str
    threshold: float
    editing: float | None
    lengths: tuple[int, ...]
    max_new_tokens: int = 20
    steps: int = BLOCK + 1
    max_post_steps: int = 16
    stop: bool = False


_LENGTHS = (1, 4, 7, 8, 9, 13, 16, 22)
CASES = (
    Case("plain", 0.8, None, _LENGTHS),
    Case("plain-4-steps", 0.8, None, _LENGTHS, steps=4),
    Case("plain-stop", 0.6, None, _LENGTHS, stop=True),
    Case("editing-0.9", 0.6, 0.9, _LENGTHS),
    Case("editing-0.5", 0.4, 0.5, _LENGTHS),
    Case("editing-0.2-post-1", 0.3, 0.2, _LENGTHS, max_post_steps=1),
    Case("editing-stop", 0.4, 0.5, _LENGTHS, max_new_tokens=28, stop=True),
)


SDAR_THRESHOLD = 0.6
SDAR_LENGTHS = (3, 8, 13, 15)


def prompts(case: Case, length: int, row: int) -> Iterator[list[int]]:
    """The candidate prompts of one row, in a fixed order."""
    generator = np.random.default_rng([ord(letter) for letter in case.name] + [row])
    while True:
        yield generator.integers(0, 256, length).tolist()


def logits_ids(name: str) -> list[int]:
    """The sequence whose logits are landed for checkpoint `name`; some masks among bytes."""
    ids = np.random.default_rng([ord(letter) for letter in name]).integers(0, 256, LOGITS_LENGTH).tolist()
    ids[5] = ids[-3] = ids[-1] = MASK
    return ids
