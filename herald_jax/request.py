"""Whether a model can serve what is asked of it: prompts become ids, and what does not go with the model is refused."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from herald_jax.config import GenerateConfig, ModelConfig
from herald_jax.denoise import Editing
from herald_jax.errors import GenerationError
from herald_jax.loading import Model
from herald_jax.plans import Dense, Herald, Mage, Plan

Prompt = str | Sequence[int]


def encode_prompts(model: Model, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The ids of each prompt. Raises GenerationError for what is neither a text nor a list of ids."""
    if isinstance(prompts, (str, bytes)):
        raise GenerationError("prompts is a single text, but a list of prompts was expected; write [prompt]")
    if not hasattr(prompts, "__len__"):
        raise GenerationError(f"prompts is {prompts!r}, but a list of prompts was expected")
    if len(prompts) == 0:
        raise GenerationError("prompts is empty, but at least one prompt was expected")
    encoded = []
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, bytes):
            raise GenerationError(f"prompt {row} is bytes, but must be a text or a list of token ids; decode it")
        try:
            ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else [operator.index(t) for t in prompt]
        except TypeError as error:
            raise GenerationError(f"prompt {row} must be a text or a list of token ids: {error}") from None
        encoded.append(ids)
    return encoded


def check_request(config: ModelConfig, request: GenerateConfig, plan: Plan, prompts: list[list[int]]) -> None:
    """Raises GenerationError for a request that this model cannot serve."""
    contract = config.diffusion
    if not isinstance(request, GenerateConfig):
        raise GenerationError(f"config is {request!r}, but must be GenerateConfig(...)")
    if not isinstance(plan, (Dense, Mage, Herald)):
        raise GenerationError(f"plan is {plan!r}, but must be Dense(), Mage(...) or Herald(...)")
    if isinstance(plan, Herald) and contract.mask_token_id is None:
        raise GenerationError(
            f"Herald selects with a mask's query, but family {config.family!r} has no mask token; use Dense() or Mage()"
        )
    if isinstance(plan, (Mage, Herald)):
        if request.block_cache:
            raise GenerationError(f"block_cache goes with the dense plan only, not with {type(plan).__name__}")
        if plan.dense_layers >= config.num_layers:
            raise GenerationError(
                f"dense_layers is {plan.dense_layers}, but the model has {config.num_layers} layers; leave some sparse"
            )
        for layer in (plan.reselect_layers or ()) if isinstance(plan, Mage) else ():
            if not plan.dense_layers <= layer < config.num_layers:
                raise GenerationError(
                    f"reselect_layers names layer {layer}, but the sparse layers are {plan.dense_layers} to "
                    f"{config.num_layers - 1}"
                )
    if isinstance(request.policy, Editing) and (contract.seeded or contract.block_length == 1):
        raise GenerationError(
            "Editing goes with families whose logits speak for their own position (LLaDA2, SDAR), not with "
            f"{config.family!r}"
        )
    if request.block_cache and contract.small_block_length == contract.block_length:
        raise GenerationError(f"block_cache needs sub-blocks, but family {config.family!r} has none")
    if request.top_k > config.vocab_size:
        raise GenerationError(f"top_k is {request.top_k}, but the vocabulary has {config.vocab_size} ids")
    if request.room > config.max_position_embeddings:
        raise GenerationError(
            f"room is {request.room}, but the model's context is {config.max_position_embeddings} tokens"
        )
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise GenerationError(f"prompt {row} is empty, but at least one token was expected")
        bad = next((t for t in prompt if not 0 <= t < config.vocab_size), None)
        if bad is not None:
            raise GenerationError(f"prompt {row} has token id {bad}, outside the vocabulary of {config.vocab_size}")
        end = len(prompt) + request.max_new_tokens
        if end > config.max_position_embeddings:
            raise GenerationError(
                f"prompt {row} has {len(prompt)} tokens and max_new_tokens is {request.max_new_tokens}, together "
                f"{end}, but the model's context is {config.max_position_embeddings} tokens; shorten one of them"
            )
