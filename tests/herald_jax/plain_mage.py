"""MAGE stated once more, in plain Python: one row, float64 selection in loops, attention under written-out masks.

Nothing of `cache`, `mage`, `select`, `block_loop` or the kernels is used; the transformer's layers are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax import GenerateConfig, Mage, ModelConfig
from herald_jax.loading import Model
from herald_jax.model import bind
from tests.herald_jax import plain

WIDTH = plain.WIDTH  # prefix entries of the one compiled pass


@functools.partial(jax.jit, static_argnames="config")
def _block_pass(config: ModelConfig, params: Any, tokens: Any, start: Any, kept: Any, visible: Any, rest: Any) -> Any:
    """One forward of a block i32[M] behind `kept`, each layer's (k, v) `[WIDTH, K, D]`, of which `visible[layer]`
    bool[K, WIDTH] is attended to, and beside it each layer's `rest`: attention f32[K, G, M, D] over other entries, and
    its lse f32[K, G, M]. Returns logits, the block's own (k, v), and the scores f32[K, G, M, WIDTH + M].
    """
    m = tokens.shape[0]

    def attend(layer: int, q: Any, k: Any, v: Any, cache: Any) -> Any:
        old_k, old_v = kept[layer]
        keys, values = jnp.concatenate([old_k, k[0]]), jnp.concatenate([old_v, v[0]])
        scores = jnp.einsum("tkgd,nkd->kgtn", q[0], keys, precision="highest") / np.sqrt(config.head_dim)
        seen = jnp.concatenate([visible[layer], jnp.ones((visible.shape[1], m), bool)], axis=1)[:, None, None]
        rest_out, rest_lse = rest[0][layer], rest[1][layer]
        whole = jnp.concatenate([jnp.where(seen, scores, -jnp.inf), rest_lse[..., None]], axis=-1)
        weights = jax.nn.softmax(whole, axis=-1)
        out = jnp.einsum("kgtn,nkd->tkgd", weights[..., :-1], values, precision="highest")
        out += jnp.moveaxis(weights[..., -1:] * rest_out, 2, 0)
        return out[None], [*cache, (k[0], v[0], scores)]

    module = bind(config, params)
    hidden, cache = module(tokens[None], (start + jnp.arange(m))[None], attend, [])
    return jnp.einsum("te,ve->tv", hidden[0], module.head_kernel(), precision="highest"), cache


def _shares(plan: Mage, scores: np.ndarray, masked: Sequence[int], prefix: int) -> list[np.ndarray]:
    """The importance [prefix] of each KV head, from one layer's scores [K, G, M, WIDTH + M]."""
    heads, group, m, _ = scores.shape
    centre = (m - 1) / 2
    queries = {
        "all": list(masked),
        "first": [min(masked)],
        "last": [max(masked)],
        "center": [min(masked, key=lambda i: (abs(i - centre), i))],
    }[plan.query]
    merged = []
    for head in range(heads):
        shares = []
        for g in range(group):
            for i in queries:
                line = scores[head, g, i].astype(np.float64)
                line = line[:prefix] if plan.normalise == "prefix" else np.concatenate([line[:prefix], line[WIDTH:]])
                weight = np.exp(line - line.max()) if len(line) else line
                shares.append((weight / weight.sum())[:prefix])
        merged.append(np.max(shares, axis=0) if plan.reduce == "max" else np.mean(shares, axis=0))
    return merged


def _page_means(values: np.ndarray, page: int) -> np.ndarray:
    """Each entry's value replaced by the mean over its page."""
    return np.array([np.mean(values[i // page * page : (i // page + 1) * page]) for i in range(len(values))])


def _choose(
    plan: Mage, scores: np.ndarray, masked: Sequence[int], prefix: int, held: np.ndarray | None = None, bonus: float = 0
) -> list[set[int]]:
    """The entries that each KV head selects; those that it has `held`, bool[K, prefix], count for more by `bonus`."""
    always = {i for i in range(prefix) if i < plan.sinks or i >= prefix - plan.recent}
    chosen = []
    for head, share in enumerate(_shares(plan, scores, masked, prefix)):
        rank = np.arange(prefix) if plan.selector == "recent" else _page_means(share, plan.page)
        if held is not None:
            rank = rank * (1 + bonus * _page_means(held[head, :prefix], plan.page))
        best = sorted((i for i in range(prefix) if i not in always), key=lambda i: (-rank[i], i))
        chosen.append(always | set(best[: plan.entries(prefix) - len(always)]))
    return chosen


def no_rest(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """`_block_pass`'s rest of a plan that drops it."""
    shape = (config.num_layers, config.num_kv_heads, config.group_size, config.diffusion.block_length)
    return np.zeros((*shape, config.head_dim), np.float32), np.full(shape, -np.inf, np.float32)


def _rest(scores: np.ndarray, values: np.ndarray, visible: np.ndarray, prefix: int) -> tuple[np.ndarray, np.ndarray]:
    """Attention [K, G, M, D] over the prefix entries that `visible` [K, WIDTH] leaves out, and its lse, of one layer.

    scores [K, G, M, WIDTH + M]; values [WIDTH, K, D].
    """
    heads, group, m, _ = scores.shape
    out, lse = np.zeros((heads, group, m, values.shape[-1])), np.full((heads, group, m), -np.inf)
    for head in range(heads):
        left = [i for i in range(prefix) if not visible[head, i]]
        if left:
            some = scores[head][:, :, left].astype(np.float64)
            weights = np.exp(some - some.max(axis=-1, keepdims=True))
            lse[head] = np.log(weights.sum(axis=-1)) + some.max(axis=-1)
            out[head] = weights @ values[left, head] / weights.sum(axis=-1, keepdims=True)
    return out, lse


def decode(
    model: Model,
    prompt: Sequence[int],
    request: GenerateConfig,
    plan: Mage,
    quality: list[tuple[float, float]] | None = None,
) -> list[int]:
    """Greedy new tokens of one prompt, stop tokens ignored; SDAR-form or seeded, without sub-blocks' cache.

    Recall and kept mass of every sparse step, layer and head are appended to `quality`.
    """
    config, contract = model.config, model.config.diffusion
    size, small, hole = contract.block_length, contract.small_block_length, contract.mask_token_id
    heads, shift = config.num_kv_heads, int(contract.logit_alignment == "shifted")
    start, end = len(prompt) // size * size, len(prompt) + request.max_new_tokens
    padded = np.array([*prompt, *[0] * (WIDTH - len(prompt))], np.int32)
    logits, prefilled = plain._pass(config, model.params, padded, np.ones(WIDTH, bool), None)
    kept = [tuple(np.array(x[0]) for x in layer) for layer in prefilled]
    for k, v in kept:
        k[start:], v[start:] = 0, 0
    seed = int(np.argmax(np.asarray(logits)[start - 1])) if start else None
    tokens = list(prompt[:start])
    known_prompt = list(prompt[start:])
    selected, before_block, block = np.zeros((config.num_layers, heads, WIDTH), bool), start, 0
    rest_out, rest_lse = no_rest(config)
    asked = np.full(size, -1)
    while True:
        canvas: list[int | None] = [*known_prompt, *[None] * (size - len(known_prompt))]
        known_prompt = []
        if contract.seeded and canvas[0] is None:
            canvas[0] = seed
        began = [i for i in range(size) if canvas[i] is None]
        everything = np.zeros((config.num_layers, heads, WIDTH), bool)
        everything[:, :, :start] = True
        visible, step = everything, 0
        selects = block % plan.select_every == 0
        if selects:
            before_block = start
        else:  # what the last selection chose, and all that was written since
            visible = selected.copy()
            visible[:, :, before_block:start] = True
        block += 1
        while True:
            if all(canvas[i] is not None or start + i >= end for i in range(size)) and start + size >= end:
                return ([*tokens, *canvas][:end])[len(prompt) :]  # type: ignore[return-value]
            exact = selects and step < plan.select_at_step
            ids = np.array([hole if token is None else token for token in canvas], np.int32)
            mask = everything if exact else visible
            # A rest is used where the position is fed what it was when its query found it.
            usable = np.where(exact | (ids != asked), np.float32(-np.inf), rest_lse)
            rest = (rest_out, usable)
            logits, cache = _block_pass(config, model.params, ids, np.int32(start), kept, mask, rest)
            masked = [i for i in range(size) if canvas[i] is None]
            if masked and not exact and quality is not None and plan.entries(start) < start:
                judging = began if plan.query == "all" else masked
                for layer in range(plan.dense_layers, config.num_layers):
                    shares = _shares(plan, np.asarray(cache[layer][2]), judging, start)
                    wanted = _choose(plan, np.asarray(cache[layer][2]), judging, start)
                    for head in range(heads):
                        have = set(np.flatnonzero(visible[layer, head]).tolist())
                        mass = shares[head][sorted(have)].sum() / shares[head].sum()
                        quality.append((len(have & wanted[head]) / len(wanted[head]), mass))
            if exact:
                visible, before = everything.copy(), None
                for layer in range(plan.dense_layers, config.num_layers):
                    if plan.selector != "tidal" or before is None:
                        asking = masked or list(range(size))
                        before = _choose(plan, np.asarray(cache[layer][2]), asking, start)
                    for head, entries in enumerate(before):
                        visible[layer, head] = np.isin(np.arange(WIDTH), sorted(entries))
                    if plan.rest == "keep":
                        of_layer = _rest(np.asarray(cache[layer][2]), kept[layer][1], visible[layer], start)
                        rest_out[layer], rest_lse[layer] = of_layer
                selected, asked = visible, ids
            if not masked:
                break
            low = masked[0] // small * small
            eligible = [i for i in masked if i < low + small]
            picks, confidence, entropy = {}, {}, {}
            for i in eligible:
                odds, entropy[i] = plain.odds_of(np.asarray(logits)[i - shift])
                picks[i] = int(np.argmax(np.asarray(logits)[i - shift]))
                confidence[i] = odds[picks[i]]
            for i in plain.reveal(request.policy, eligible, confidence, entropy, step, size):
                canvas[i] = picks[i]
            step += 1
        for (k, v), (new_k, new_v, _) in zip(kept, cache, strict=True):
            k[start : start + size], v[start : start + size] = new_k, new_v
        tokens += [token for token in canvas if token is not None]
        seed = int(np.argmax(np.asarray(logits)[-1]))
        start += size
