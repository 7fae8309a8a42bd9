"""`python -m benchmarks.herald_traffic CHECKPOINT`: what reuse leaves of HERALD's traffic, on text of a trained model.

The model continues pieces of the packaged text for some blocks. Counted are the rows of K and V that a block's pool
takes from the host's cache, and those that it takes from the pool before. They are the same on any machine, so this
needs no GPU. (`benchmarks.herald` counts them on random weights, beside its times.)
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import herald_jax
from benchmarks import common
from herald_jax import GenerateConfig, Herald, Model, Threshold, tasks

# The default plan, and what is compared with it whatever its defaults are.
PLANS = {
    "gather/reuse/traffic_fraction": Herald(0.05),
    "gather/reuse/bonus0/traffic_fraction": Herald(0.05, keep_bonus=0.0),
    "gather/reuse/bonus0.5/traffic_fraction": Herald(0.05, keep_bonus=0.5),
    "gather/reuse/bonus1/traffic_fraction": Herald(0.05, keep_bonus=1.0),
    "gather/reuse/bonus0/single_entries/traffic_fraction": Herald(0.05, page_size=1, keep_bonus=0.0),
    "gather/reuse/bonus0.5/single_entries/traffic_fraction": Herald(0.05, page_size=1, keep_bonus=0.5),
    "gather/reuse/bonus0/budget10/traffic_fraction": Herald(0.1, keep_bonus=0.0),
    "gather/reuse/bonus0.5/budget10/traffic_fraction": Herald(0.1, keep_bonus=0.5),
}
GOAL = "<=0.5"


def pieces(encode: Callable[[str], list[int]], count: int, length: int) -> list[list[int]]:
    """So many prompts of `length` tokens, one behind the other in the text."""
    sentences = iter(tasks.default_haystack().sentences)
    ids = list(itertools.islice((i for s in sentences for i in encode(s + " ")), count * length))
    if len(ids) < count * length:
        raise SystemExit(f"error: the text has {len(ids)} tokens, not {count} times {length}; ask for fewer --texts")
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def fraction(model: Model, prompts: list[list[int]], plan: Herald, blocks: int) -> float:
    """Bytes fetched under `plan`, over those that would be without reuse."""
    new = blocks * model.config.diffusion.block_length
    request = GenerateConfig(max_new_tokens=new, policy=Threshold(0.9), ignore_stop=True)
    moved = herald_jax.generate(model, prompts, request, plan).stats.offload
    assert moved is not None  # under HERALD there is
    return moved.fetched_bytes / (moved.fetched_bytes + moved.reused_bytes)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark that has a model continue `pieces`."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("checkpoint", help="a converted checkpoint: the reference model")
    parser.add_argument("--lengths", default="4096,8000", help="of the prompts, in tokens (default %(default)s)")
    parser.add_argument("--texts", type=int, default=4, help="of each length (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=6, help="written behind each (default %(default)s)")
    common.output_option(parser)
    return parser


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=PLANS, metavar="ROW", help="this row, beside the others that there are")
    options = parser.parse_args()
    model = herald_jax.load(options.checkpoint)
    rows: list[dict[str, Any]] = []
    measured: dict[Herald, dict[int, float]] = {}
    for id, plan in PLANS.items():
        if options.only not in (None, id):
            continue
        same = dataclasses.replace(plan, keep_bonus=plan.bonus)
        if same not in measured:
            measured[same] = {}
            for length in map(int, options.lengths.split(",")):
                prompts = pieces(model.tokenizer.encode, options.texts, length)
                measured[same][length] = fraction(model, prompts, plan, options.blocks)
                common.stage(f"{id}, {length} tokens: {measured[same][length]:.3f}")
        found = measured[same]
        detail = {"by_length": found, "texts": options.texts, "blocks": options.blocks,
                  "page_size": plan.page_size, "keep_bonus": plan.bonus}  # fmt: skip
        goal = GOAL if id == next(iter(PLANS)) else None
        rows.append(common.row(id, sum(found.values()) / len(found), "", goal=goal, detail=detail))
        common.write_results("herald", rows, folder=options.out, by_id=options.only is not None)
    common.print_rows(rows)


if __name__ == "__main__":
    main()
