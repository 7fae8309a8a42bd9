"""HERALD stated once more, in plain Python: one row, everything on one device, selection in float64 loops.

Nothing of the pipeline, pools, caches, scans or kernels is used; the transformer's layers are, under written-out masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from herald_jax import GenerateConfig, Herald, Mage
from herald_jax.loading import Model
from tests.herald_jax import plain, plain_mage

WIDTH = plain_mage.WIDTH


def _as_mage(plan: Herald) -> Mage:
    """The plan that states the same choice from a block's queries."""
    query = "all" if plan.query == "mean" else plan.query
    return Mage(
        plan.budget, query=query, reduce=plan.reduce, normalise="prefix", dense_layers=plan.dense_layers,
        min_budget=plan.min_budget, sinks=plan.sinks, recent=plan.recent,
        page_size=plan.page_size,
    )  # fmt: skip


def _chosen(
    plan: Herald, scores: Any, asking: Sequence[int], prefix: int, resident: range, layers: int,
    held: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Visible entries bool[L, K, WIDTH] for the next block, from each layer's scores [K, G, M, WIDTH + M].

    `held` are this block's, if any were chosen.
    """
    heads = np.asarray(scores[0]).shape[0]
    visible = np.zeros((layers, heads, WIDTH), bool)
    visible[: plan.dense_layers, :, : prefix + len(resident)] = True
    visible[:, :, resident] = True
    for layer in range(plan.dense_layers, layers):
        of_layer, who = np.asarray(scores[layer]), list(asking)
        if plan.query == "mean":  # scores are linear in the query
            of_layer, who = of_layer[:, :, who].mean(axis=2, keepdims=True), [0]
        now = None if held is None else held[layer]
        for head, entries in enumerate(plain_mage._choose(_as_mage(plan), of_layer, who, prefix, now, plan.bonus)):
            visible[layer, head, sorted(entries)] = True
    return visible


def decode(model: Model, prompt: Sequence[int], request: GenerateConfig, plan: Herald) -> list[int]:
    """Greedy new tokens of one prompt, stop tokens ignored."""
    config, contract = model.config, model.config.diffusion
    size, small, hole = contract.block_length, contract.small_block_length, contract.mask_token_id
    heads, layers, shift = config.num_kv_heads, config.num_layers, int(contract.logit_alignment == "shifted")
    start, end = len(prompt) // size * size, len(prompt) + request.max_new_tokens
    padded = np.array([*prompt, *[0] * (WIDTH - len(prompt))], np.int32)
    logits, prefilled = plain._pass(config, model.params, padded, np.ones(WIDTH, bool), None)
    kept = [tuple(np.array(x[0]) for x in layer) for layer in prefilled]
    for k, v in kept:
        k[start:], v[start:] = 0, 0

    def forward(ids: Sequence[int], at: int, cache: Any, visible: np.ndarray) -> tuple[np.ndarray, Any]:
        ids, rest = np.array(ids, np.int32), plain_mage.no_rest(config)
        out, new = plain_mage._block_pass(config, model.params, ids, np.int32(at), cache, visible, rest)
        return np.asarray(out), new

    def extended(cache: Any, new: Any, at: int) -> Any:
        longer = [(k.copy(), v.copy()) for k, v in cache]
        for (k, v), (new_k, new_v, _) in zip(longer, new, strict=True):
            k[at : at + size], v[at : at + size] = new_k, new_v
        return longer

    tokens, remainder = list(prompt[:start]), list(prompt[start:])
    everything = np.zeros((layers, heads, WIDTH), bool)
    everything[:, :, :start] = True
    first = [*remainder, *[hole] * (size - len(remainder))]
    _, cache = forward(first, start, kept, everything)
    asking = [i for i in range(len(remainder), size) if not (contract.seeded and i == 0)]
    visible = _chosen(plan, [c[2] for c in cache], asking, start, range(start, start), layers)
    seed = int(np.argmax(np.asarray(logits)[start - 1])) if start else hole
    while True:
        canvas: list[int | None] = [*remainder, *[None] * (size - len(remainder))]
        remainder = []
        if contract.seeded and canvas[0] is None:
            canvas[0] = seed
        draft: list[int] | None = None
        step = 0
        while None in canvas:
            lines, _ = forward([hole if t is None else t for t in canvas], start, kept, visible)
            masked = [i for i in range(size) if canvas[i] is None]
            low = masked[0] // small * small
            eligible = [i for i in masked if i < low + small]
            picks, confidence, entropy = {}, {}, {}
            for i in eligible:
                odds, entropy[i] = plain.odds_of(lines[i - shift])
                picks[i] = int(np.argmax(lines[i - shift]))
                confidence[i] = odds[picks[i]]
            for i in plain.reveal(request.policy, eligible, confidence, entropy, step, size):
                canvas[i] = picks[i]
            step += 1
            if draft is None and size - canvas.count(None) >= math.ceil(plan.draft_at * size):
                guess = [int(np.argmax(lines[i - shift])) for i in range(size)]  # i = 0 and shifted: the next seed
                draft = [*(g if t is None else t for t, g in zip(canvas, guess, strict=True)), guess[0]]
            if start + size >= end and all(canvas[i] is not None or start + i >= end for i in range(size)):
                return ([*tokens, *canvas][:end])[len(prompt) :]  # type: ignore[return-value]
        assert draft is not None
        _, now = forward(draft[:size], start, kept, visible)
        behind = visible.copy()
        behind[:, :, start : start + size] = True
        following = [draft[size] if contract.seeded and i == 0 else hole for i in range(size)]
        _, ahead = forward(following, start + size, extended(kept, now, start), behind)
        lines, now = forward(canvas, start, kept, visible)  # type: ignore[arg-type]
        kept = extended(kept, now, start)
        tokens += [token for token in canvas if token is not None]
        asking = list(range(int(contract.seeded), size))
        resident = range(start, start + size)
        visible = _chosen(plan, [c[2] for c in ahead], asking, start, resident, layers, held=visible)
        seed = int(np.argmax(lines[-1]))
        start += size
