"""The training loss by a public implementation: `turbo-dllm`'s Fast-dLLM v2 objective over a transformers model.

turbo-dllm draws the noise and says which row learns which token (complementary masks, shifted labels, denominator);
transformers computes the logits. Each noisy block is run on its own, behind the clean tokens before it, exactly as a
decoder would run it: no [x_t | x_0] mask is restated here. The SDAR row takes the same noise with unshifted labels.
"""

from __future__ import annotations

import numpy as np
import torch
from dllm_parallel.core.objectives.fast_dllm_v2 import FastDLLMv2ObjectiveRuntime
from dllm_parallel.core.objectives.runtime import LABEL_IGNORE_INDEX, TokenAccountingPolicy
from transformers import PreTrainedModel

from tests.oracles import zoo
from tests.oracles.cases import MASK
from tests.oracles.samplers import full_logits

BLOCK, ROWS, LENGTH = 8, 2, 40


def _noisy_logits(model: PreTrainedModel, clean: torch.Tensor, noisy: torch.Tensor) -> torch.Tensor:
    """Logits f32[N, V] of the noisy copy of each block, behind the clean blocks before it."""
    parts = []
    for start in range(0, len(clean), BLOCK):
        ids = [*clean[:start].tolist(), *noisy[start : start + BLOCK].tolist()]
        parts.append(full_logits(model, ids, BLOCK)[start:])
    return torch.cat(parts)


@torch.no_grad()
def record() -> dict[str, np.ndarray]:
    """The batch, its noise, and the loss of each alignment."""
    generator = np.random.default_rng(20)
    clean = torch.tensor(generator.integers(0, 256, (ROWS, LENGTH)))
    # Some tokens are given, as a prompt is: never masked, never learned.
    supervised = torch.tensor(generator.random((ROWS, LENGTH)) < 0.8)
    runtime = FastDLLMv2ObjectiveRuntime(
        mask_token_id=MASK, block_size=BLOCK, seq_len=LENGTH, device=torch.device("cpu"), seed=3,
        token_accounting=TokenAccountingPolicy(ROWS, ROWS, 1, 1, 1, 1, 1, False),
    )  # fmt: skip
    drawn = runtime.corrupt(clean, supervision_mask=supervised)
    masked = (drawn.noisy_input_ids == MASK) & (drawn.clean_input_ids != MASK)
    recorded = {"tokens": clean.numpy(), "supervised": supervised.numpy(), "masked": masked.numpy()}
    for name, labels in (
        ("fast-dllm-v2", drawn.labels),
        ("sdar", torch.where(masked, drawn.clean_input_ids, LABEL_IGNORE_INDEX)),
    ):
        model = zoo.load(name)
        logits = torch.stack(
            [_noisy_logits(model, c, x) for c, x in zip(drawn.clean_input_ids, drawn.noisy_input_ids, strict=True)]
        )
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=LABEL_IGNORE_INDEX, reduction="sum"
        )
        count = drawn.loss_denominator if name == "fast-dllm-v2" else float(supervised.sum())
        recorded[f"{name}/loss"] = np.float64(float(total) / count)
    return recorded
