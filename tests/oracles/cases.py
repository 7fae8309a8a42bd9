"""Which decodes are recorded: one `Case` is one batch of prompts under one policy, each row decoded on its own.

Every batch mixes prompt lengths: all remainders 0..M-1 of the block length, prompts shorter than a block, of exactly
one and exactly two blocks. `MARGIN` is how far from tipping over every decision must be for a row to be landed: rows
are drawn until theirs are, so that float32 rounding (about 1e-5 in a logit here) cannot change a token.

This module needs neither torch nor transformers: the tests of `herald_jax` read the landed values through it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator

import numpy as np

MARGIN = 1e-3
VOCAB = 320  # more rows than the tokenizer has tokens, as in Qwen's checkpoints
MASK = 259  # the tokenizer's last token


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which masked positions a step reveals. `kind`: "static", "threshold", "entropy" or "sequential".

    `steps` is the number of denoising steps the block is planned for; None plans one token a step.
    """

    kind: str
    steps: int | None = None
    threshold: float | None = None
    bound: float | None = None

    def quota(self, block_length: int, step: int) -> int:
        """How many positions step `step` (from 0) is planned to reveal: the remainder goes to the first steps.

        The published schedules end with the block. Confined to small blocks, a block can take more steps than planned:
        then it goes on without the remainder.
        """
        base, extra = divmod(block_length, self.steps or block_length)
        return base + (1 if step < extra else 0)


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch: `model` of the zoo at a block length, one policy, prompt lengths, number of new tokens.

    `mask_in_prompt`: the mask token's id is typed into every prompt, once in its middle and once as its last token.
    `stops`: how many of the tokens that the rows produce without any become stop tokens.
    """

    name: str
    model: str
    block_length: int
    small_block_length: int
    policy: Policy
    lengths: tuple[int, ...]
    max_new_tokens: int
    block_cache: bool = False
    mask_in_prompt: bool = False
    stops: int = 0


def remainders(block_length: int) -> tuple[int, ...]:
    """Every remainder 0..M-1 after 0, 1 or 2 whole blocks (never an empty prompt), and M and 2M."""
    lengths = [rest + block_length * (rest % 3 or (rest == 0)) for rest in range(block_length)]
    return (*lengths, 2 * block_length)


def _short(block_length: int) -> tuple[int, ...]:
    """For small blocks: every length 1..M+1, then 2M-1, 2M, 3M and one long prompt of each parity."""
    return (*range(1, block_length + 2), *(n * block_length + d for n, d in ((2, -1), (2, 0), (3, 0), (5, 1), (6, 2))))


STATIC, DYNAMIC, ENTROPY, ORDER = "static", "threshold", "entropy", "sequential"
_4, _8, _32 = _short(4), _short(8), remainders(32)
# Room for two mask tokens and something before them; as many rows as without, so that the same compiled loop serves.
_4_TYPED, _8_TYPED = tuple(max(n, 3) for n in _4), tuple(max(n, 3) for n in _8)

CASES: tuple[Case, ...] = (
    # SDAR, block 4 as published
    Case("sdar-4/static-1", "sdar", 4, 4, Policy(STATIC, 1), _4, 14),
    Case("sdar-4/static-3", "sdar", 4, 4, Policy(STATIC, 3), _4, 14),
    Case("sdar-4/threshold-0.9", "sdar", 4, 4, Policy(DYNAMIC, threshold=0.9), _4, 14),
    Case("sdar-4/threshold-0.6-of-2", "sdar", 4, 4, Policy(DYNAMIC, 2, threshold=0.6), _4, 14),
    Case("sdar-4/entropy-0.7", "sdar", 4, 4, Policy(ENTROPY, bound=0.7), _4, 14),
    Case("sdar-4/sequential-2", "sdar", 4, 4, Policy(ORDER, 2), _4, 14),
    Case("sdar-4/mask-in-prompt", "sdar", 4, 4, Policy(DYNAMIC, threshold=0.6), _4_TYPED, 14, mask_in_prompt=True),
    Case("sdar-4/stop", "sdar", 4, 4, Policy(DYNAMIC, threshold=0.6), _4, 22, stops=1),
    Case("sdar-tied-4/threshold-0.8", "sdar-tied", 4, 4, Policy(DYNAMIC, threshold=0.8), _4, 14),
    Case("sdar-4/long", "sdar", 4, 4, Policy(DYNAMIC, threshold=0.6), (2, 131), 301),
    # SDAR, the longer blocks of its -b8 to -b64 checkpoints
    Case("sdar-8/static-3", "sdar", 8, 8, Policy(STATIC, 3), _8, 20),
    Case("sdar-8/threshold-0.8-of-4", "sdar", 8, 8, Policy(DYNAMIC, 4, threshold=0.8), _8, 20),
    Case("sdar-32/static-10", "sdar", 32, 32, Policy(STATIC, 10), _32, 40),
    Case("sdar-32/threshold-0.8", "sdar", 32, 32, Policy(DYNAMIC, threshold=0.8), _32, 40),
    Case("sdar-32/entropy-2.5", "sdar", 32, 32, Policy(ENTROPY, bound=2.5), _32, 40),
    # Fast-dLLM v2, block 8 of two small blocks
    Case("fdv2-8/threshold-0.9", "fast-dllm-v2", 8, 4, Policy(DYNAMIC, threshold=0.9), _8, 20),
    Case("fdv2-8/threshold-0.5", "fast-dllm-v2", 8, 4, Policy(DYNAMIC, threshold=0.5), _8, 20),
    Case("fdv2-8/threshold-0.9-cache", "fast-dllm-v2", 8, 4, Policy(DYNAMIC, threshold=0.9), _8, 20, True),
    Case("fdv2-8/static-4", "fast-dllm-v2", 8, 4, Policy(STATIC, 4), _8, 20),
    Case("fdv2-8/stop", "fast-dllm-v2", 8, 4, Policy(DYNAMIC, threshold=0.6), _8, 28, stops=1),
    Case("fdv2-8/stop-cache", "fast-dllm-v2", 8, 4, Policy(DYNAMIC, threshold=0.6), _8, 28, True, stops=1),
    Case(
        "fdv2-8/mask-in-prompt", "fast-dllm-v2", 8, 4, Policy(DYNAMIC, threshold=0.6), _8_TYPED, 20, mask_in_prompt=True
    ),
    Case("fdv2-8/long-cache", "fast-dllm-v2", 8, 4, Policy(DYNAMIC, threshold=0.6), (129, 3), 301, True),
    # Fast-dLLM v2, block 32 of four small blocks as published
    Case("fdv2-32/threshold-0.9", "fast-dllm-v2", 32, 8, Policy(DYNAMIC, threshold=0.9), _32, 40),
    Case("fdv2-32/threshold-0.7-cache", "fast-dllm-v2", 32, 8, Policy(DYNAMIC, threshold=0.7), _32, 40, True),
    Case("fdv2-32/static-6", "fast-dllm-v2", 32, 8, Policy(STATIC, 6), _32, 40),
    Case("fdv2-32/entropy-2.5-cache", "fast-dllm-v2", 32, 8, Policy(ENTROPY, bound=2.5), _32, 40, True),
    Case("fdv2-32/sequential-16", "fast-dllm-v2", 32, 8, Policy(ORDER, 16), _32, 40),
)

# Base causal LMs: plain greedy decoding by transformers' own generate(), the block path's limit of block length 1.
CAUSAL = ("llama3", "qwen2-tied", "qwen3-untied")
CAUSAL_LENGTHS = (1, 2, 3, 7, 8, 9, 31, 33)
CAUSAL_NEW_TOKENS = 24

LOGITS_LENGTH = 37
LOGITS_BLOCKS = {"sdar": (4, 32), "sdar-tied": (4,), "fast-dllm-v2": (8, 32)}


def prompts(case: Case, length: int, row: int) -> Iterator[list[int]]:
    """The candidate prompts of one row, in a fixed order: bytes, and the mask token where the case asks for it."""
    seed = [ord(letter) for letter in case.name] + [row]
    generator = np.random.default_rng(seed)
    while True:
        prompt = generator.integers(0, 256, length).tolist()
        if case.mask_in_prompt:
            prompt[length // 2] = prompt[-1] = MASK
        yield prompt


def logits_ids(name: str) -> list[int]:
    """The sequence whose logits are landed for checkpoint `name`: every byte can occur, and the mask does."""
    generator = np.random.default_rng([ord(letter) for letter in name])
    ids = generator.integers(0, VOCAB, LOGITS_LENGTH).tolist()
    ids[5] = ids[-3] = ids[-1] = MASK
    return ids


def assert_as_landed(made: pathlib.Path, kept: pathlib.Path) -> None:
    """A checkpoint directory that a script has just written is the landed one: same files, same texts, same weights."""
    from safetensors.numpy import load_file

    files = [{path.name: path for path in root.iterdir()} for root in (made, kept)]
    assert files[0].keys() == files[1].keys()
    for file in files[0].keys() - {"model.safetensors"}:
        assert json.loads(files[0][file].read_text()) == json.loads(files[1][file].read_text()), file
    tensors, expected = (load_file(named["model.safetensors"]) for named in files)
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(tensors[key], value, rtol=1e-5, atol=1e-6, err_msg=key)
