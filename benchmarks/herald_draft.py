"""`python -m benchmarks.herald_draft CHECKPOINT`: how much of what a block would choose itself its draft has chosen.

The model continues pieces of the packaged text under HERALD. Whenever a pool has been filled from a draft, the block
that is to use it is asked, too: exactly, layer by layer over the whole cache, as `draft=False` does at a block's first
step. Both choices are of one state, so what differs is the draft's doing. Counted are, of the entries that the block
itself would choose, those that the pool holds (chosen from the draft, or of the block before), and the attention to the
prefix that the pool's entries have, over that of the block's own. Needs no GPU.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

import herald_jax
from benchmarks import common
from benchmarks.herald_traffic import parser_of, pieces
from herald_jax import GenerateConfig, Herald, Model, Threshold, host_prefill, select
from herald_jax.cache import DeviceKV
from herald_jax.generate import _Run
from herald_jax.host_kv import HostKV
from herald_jax.loop_state import Rows
from herald_jax.model import bind

# The draft's doing alone, and with what the pool holds preferred, as by default.
PLANS = {
    "draft/overlap": Herald(0.05, keep_bonus=0.0),
    "draft/at0/overlap": Herald(0.05, draft_at=0.0, keep_bonus=0.0),
    "draft/budget10/overlap": Herald(0.1, keep_bonus=0.0),
    "draft/default/overlap": Herald(0.05),
}


def own_choice(model: Model, rows: Rows, host: HostKV, plan: Herald) -> tuple[np.ndarray, np.ndarray]:
    """What a block of masks chooses at its own first step: flags bool[L, B, K, N], and the importance f32[L, B, K, N].

    For plans without dense layers, on one device.
    """
    module = bind(model.config, model.params)
    assert plan.dense_layers == 0
    assert model.config.diffusion.mask_token_id is not None  # a model that HERALD serves has one
    inputs = host_prefill._inputs(rows, model.config.diffusion.mask_token_id)
    ahead = host_prefill._embed(module.embed.embedding[...], inputs)
    chosen, importances = [], []
    for layer, k, v in zip(module.layers, host.k, host.v, strict=True):
        kv = DeviceKV(*(jax.device_put(x, x.sharding, may_alias=False) for x in (k, v)))
        ahead, _, importance = host_prefill._ahead_alone(
            *nnx.split(layer), ahead, kv, rows.length, ~rows.known, config=model.config, plan=plan, mesh=None,
            implementation=None, exact_only=False,
        )  # fmt: skip
        counts = select.budget_of(plan, rows.length)
        capacity = select.selected_capacity(plan, int(rows.length.max()))
        chosen.append(flags(select.pick(plan, importance, counts, rows.length, capacity, None), importance.shape[-1]))
        importances.append(np.asarray(importance))
    return np.stack(chosen), np.stack(importances)


def flags(indices: Any, slots: int) -> np.ndarray:
    """Which of `slots` entries indices i32[..., P] name (-1 names none), bool[..., slots]."""
    indices = np.asarray(indices)
    found = np.zeros((*indices.shape[:-1], slots + 1), bool)
    np.put_along_axis(found, np.where(indices < 0, slots, indices), True, axis=-1)
    return found[..., :slots]


def compared(model: Model, prompts: list[list[int]], plan: Herald, blocks: int) -> tuple[float, float]:
    """Share of each block's own choice that the drafted pool holds, and the attention it keeps over the own choice's.

    Means over layers, rows, KV heads and `blocks` blocks.
    """
    block = model.config.diffusion.block_length
    request = GenerateConfig(max_new_tokens=(blocks + 1) * block, policy=Threshold(0.9), ignore_stop=True)
    held, kept = [], []
    with _Run(model, prompts, request, plan, None, None) as run:
        pipeline, rows = run._pipeline, run._rows
        assert pipeline is not None  # HERALD has one
        for _ in range(blocks):
            begun = pipeline.begin(rows, request.policy, run._sampling, run._stops, last=False)
            rows = pipeline.rest(begun, last=False)
            own, importance = own_choice(model, rows, pipeline._host, plan)
            slots = own.shape[-1]
            length = np.asarray(rows.length)[:, None, None]
            last = (np.arange(slots) >= length - block) & (np.arange(slots) < length)
            pool = flags(pipeline._held.indices, slots) | last
            held.append((own & pool).sum(-1) / own.sum(-1))
            kept.append((importance * pool).sum(-1) / (importance * own).sum(-1))
    return float(np.mean(held)), float(np.mean(kept))


def main() -> None:
    options = parser_of(__doc__).parse_args()
    model = herald_jax.load(options.checkpoint)
    rows: list[dict[str, Any]] = []
    for id, plan in PLANS.items():
        found = {}
        for length in map(int, options.lengths.split(",")):
            prompts = pieces(model.tokenizer.encode, options.texts, length)
            found[length] = compared(model, prompts, plan, options.blocks)
            common.stage(f"{id}, {length} tokens: {found[length][0]:.3f}, attention {found[length][1]:.3f}")
        detail = {"by_length": {length: held for length, (held, _) in found.items()},
                  "attention": {length: kept for length, (_, kept) in found.items()},
                  "texts": options.texts, "blocks": options.blocks, "page_size": plan.page_size,
                  "keep_bonus": plan.bonus}  # fmt: skip
        rows.append(common.row(id, sum(held for held, _ in found.values()) / len(found), "", detail=detail))
        common.write_results("herald_draft", rows, folder=options.out)
    common.print_rows(rows)


if __name__ == "__main__":
    main()
