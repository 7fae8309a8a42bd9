"""The accuracy that each plan keeps on a model that really retrieves: `python -m benchmarks.accuracy CHECKPOINT`.

Runs `herald_jax.evaluate` on the synthetic tasks and turns its table into rows. Budgets are exact: `min_budget` is off.
Drops are in points of the task mean, against the dense plan on the same samples. Interrupted, it goes on where it
stopped (`--work`). `--ablation` measures instead what decides the defaults, one option at a time at 5 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import herald_jax
from benchmarks import common
from herald_jax import evaluate
from herald_jax.config import GenerateConfig
from herald_jax.eval_report import describe
from herald_jax.plans import Dense, Herald, Mage, Plan
from herald_jax.tasks import ANSWER_TOKENS, TASKS

BUDGETS = (0.02, 0.05, 0.1)
BASELINES = ("quest", "tidal", "recent")
# Issue 6's goals, by row id. Drops are in points.
GOALS = {
    "dense/4k/single_needle": ">=95",
    "dense/4k/mean": ">=85",
    "dense/8k/mean": ">=80",
    "mage/5/4k/drop": "<=1",
    "mage/5/8k/drop": "<=1",
    "mage/10/4k/drop": "<=0.5",
    "mage/10/8k/drop": "<=0.5",
    "herald/5/4k/drop": "<=1.5",
    "herald/5/8k/drop": "<=1.5",
    "herald/10/4k/drop": "<=1",
    "herald/10/8k/drop": "<=1",
    "mage/5/aggregation/drop": "<=5",
    "mage/worst_margin_over_baselines": ">=0",
    "mage/5/steps_ratio": "<=1.05",
    "mage/5/recall": ">=0.84",
    "finetune/2/gap_closed": ">=0.5",
}


def mage(budget: float, **options: Any) -> Mage:
    return Mage(budget=budget, min_budget=1, **options)


def plans(*, herald: bool) -> list[Plan]:
    """Dense, MAGE, the baselines and, if wanted, HERALD, each at every budget."""
    found: list[Plan] = [Dense(), *(mage(b, measure=b == 0.05) for b in BUDGETS)]
    found += [mage(b, selector=name) for name in BASELINES for b in BUDGETS]
    if herald:
        found += [Herald(budget=b, min_budget=1) for b in BUDGETS[1:]]
    return found


def ablations(*, herald: bool) -> dict[str, Plan]:
    """What each row of the ablation changes."""
    found: dict[str, Plan] = {
        "default": mage(0.05),
        "query=center": mage(0.05, query="center"),
        "query=first": mage(0.05, query="first"),
        "query=last": mage(0.05, query="last"),
        "reduce=max": mage(0.05, reduce="max"),
        "normalise=prefix": mage(0.05, normalise="prefix"),
        "select_at_step=2": mage(0.05, select_at_step=2),
        "dense_layers=0": mage(0.05, dense_layers=0),
        "dense_layers=1": mage(0.05, dense_layers=1),
        "allocate=layer_adaptive": mage(0.05, allocate="layer_adaptive"),
        "sinks=4,recent=32": mage(0.05, sinks=4, recent=32),
        "oracle": mage(0.05, selector="oracle"),
    }
    if herald:
        found |= {f"herald draft_at={d}": Herald(budget=0.05, min_budget=1, draft_at=d) for d in (0.25, 0.5, 0.75)}
        found |= {f"herald query={q}": Herald(budget=0.05, min_budget=1, query=q) for q in ("first", "last", "all")}
        found["herald draft=False"] = Herald(budget=0.05, min_budget=1, draft=False)
    return found


class Table:
    """The results by (plan, set) and (plan, group)."""

    def __init__(self, summary: dict[str, Any]):
        self.rows = {(row["plan"], row["set"]): row for row in summary["rows"]}
        self.means = {(row["plan"], row["group"]): row for row in summary["means"]}

    def mean(self, plan: Plan, length: int) -> float:
        return 100 * self.means[describe(plan), str(length)]["score"]

    def score(self, plan: Plan, name: str) -> dict[str, Any]:
        return self.rows[describe(plan), name]


def name_of(length: int) -> str:
    return f"{length // 1024}k"


def accuracy_rows(table: Table, chosen: list[Plan], lengths: list[int]) -> list[dict[str, Any]]:
    """All rows that one evaluation gives."""
    rows: list[dict[str, Any]] = []

    def add(id: str, value: float, unit: str, detail: dict[str, Any] | None = None) -> None:
        rows.append(common.row(id, value, unit, goal=GOALS.get(id), detail=detail))

    for length in lengths:
        where = name_of(length)
        dense = table.mean(Dense(), length)
        mean = table.means[describe(Dense()), str(length)]
        add(f"dense/{where}/mean", dense, "%", {"low": 100 * mean["low"], "high": 100 * mean["high"]})
        for task in TASKS:
            found = table.score(Dense(), f"{task}/{length}")
            add(
                f"dense/{where}/{task}", 100 * found["score"], "%",
                {"low": 100 * found["low"], "high": 100 * found["high"], "samples": found["samples"],
                 "steps_per_block": found["steps_per_block"]},
            )  # fmt: skip
        for plan in chosen[1:]:
            assert isinstance(plan, Mage | Herald)
            by_task = {
                task: {
                    "drop": 100 * row["drop"],
                    "low": 100 * row["drop_low"],
                    "high": 100 * row["drop_high"],
                    "steps_per_block": row["steps_per_block"],
                    "replay_agreement": row.get("replay_agreement"),
                }
                for task in TASKS
                for row in [table.score(plan, f"{task}/{length}")]
            }
            kind = "herald" if isinstance(plan, Herald) else plan.selector
            id = f"{kind}/{round(100 * plan.budget)}/{where}/drop"
            add(id, dense - table.mean(plan, length), "points", {"by_task": by_task})
    # The rows that speak for several cases.
    margins = {
        f"{name_of(length)}/{round(100 * b)}": table.mean(mage(b), length)
        - max(table.mean(mage(b, selector=n), length) for n in BASELINES)
        for length in lengths
        for b in BUDGETS
    }
    add("mage/worst_margin_over_baselines", min(margins.values()), "points", margins)
    five = mage(0.05)
    sets = [f"{task}/{length}" for task in TASKS for length in lengths]
    drops = {name_of(n): 100 * table.score(five, f"common_words/{n}")["drop"] for n in lengths}
    add("mage/5/aggregation/drop", max(drops.values()), "points", drops)
    steps = [table.score(plan, name)["steps_per_block"] for plan in (five, Dense()) for name in sets]
    ratio = sum(steps[: len(sets)]) / max(sum(steps[len(sets) :]), 1e-9)
    add("mage/5/steps_ratio", ratio, "x")
    recalls = [r for r in (table.score(five, name)["recall"] for name in sets) if r is not None]
    if recalls:
        masses = [
            table.score(five, name)["mass_kept"] for name in sets if table.score(five, name)["recall"] is not None
        ]
        add("mage/5/recall", sum(recalls) / len(recalls), "", {"mass_kept": sum(masses) / len(masses)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="a converted checkpoint: the reference model")
    parser.add_argument("--finetuned", help="the same after MAGE fine-tuning, for finetune/2/gap_closed")
    parser.add_argument("--lengths", default="4096,8192")
    parser.add_argument("--samples", type=int, default=40, help="of each task and length")
    parser.add_argument("--replays", type=int, default=2, help="of each task and length, with forced tokens")
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--herald", action="store_true", help="HERALD's plan too")
    parser.add_argument("--ablation", action="store_true", help="only the ablation, at the first length")
    parser.add_argument("--work", type=Path, help="where answers are kept, to go on later (default: nowhere)")
    common.output_option(parser)
    options = parser.parse_args()
    lengths = [int(part) for part in options.lengths.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        if options.ablation:
            rows = run_ablation(options, lengths[0], work)
        else:
            chosen = plans(herald=options.herald)
            table = run_one(options, options.checkpoint, chosen, lengths, work / "accuracy", options.replays)
            rows = accuracy_rows(table, chosen, lengths)
            if options.finetuned:
                pair: list[Plan] = [Dense(), mage(0.02)]
                after = run_one(options, options.finetuned, pair, lengths[:1], work / "finetuned", 0)
                before_gap = table.mean(Dense(), lengths[0]) - table.mean(mage(0.02), lengths[0])
                after_gap = table.mean(Dense(), lengths[0]) - after.mean(mage(0.02), lengths[0])
                detail = {
                    "gap_before": before_gap,
                    "gap_after": after_gap,
                    "dense_after": after.mean(Dense(), lengths[0]),
                }
                closed = 1 - after_gap / before_gap if before_gap > 0 else 1.0
                rows.append(
                    common.row("finetune/2/gap_closed", closed, "", goal=GOALS["finetune/2/gap_closed"], detail=detail)
                )
    common.write_results("accuracy-ablation" if options.ablation else "accuracy", rows, folder=options.out)
    common.print_rows(rows)


def run_one(
    options: argparse.Namespace, checkpoint: str, chosen: list[Plan], lengths: list[int], work: Path, replays: int
) -> Table:
    """Evaluate one checkpoint; replays leave HERALD out, which does not run in the block loop."""
    model = herald_jax.load(checkpoint)
    sets = [
        evaluate.task_set(model, task, length, options.samples, seed=0, haystack=None, chat=False)
        for length in lengths
        for task in TASKS
    ]
    config = GenerateConfig(max_new_tokens=ANSWER_TOKENS)
    settings = {"checkpoint": checkpoint, "samples": options.samples, "batch_size": options.batch_size}
    if replays:
        replayed = [plan for plan in chosen if not isinstance(plan, Herald)]
        more = {"batch_size": options.batch_size, "replays": replays}
        evaluate.run(model, replayed, sets, config, work, settings=settings, **more)
    summary = evaluate.run(model, chosen, sets, config, work, settings=settings, batch_size=options.batch_size)
    return Table(summary)


def run_ablation(options: argparse.Namespace, length: int, work: Path) -> list[dict[str, Any]]:
    """One row per changed option: the drop in points of the task mean."""
    found = ablations(herald=options.herald)
    chosen: list[Plan] = [Dense(), *(dataclasses.replace(plan) for plan in found.values())]
    table = run_one(options, options.checkpoint, chosen, [length], work / "ablation", 0)
    rows = []
    for name, plan in found.items():
        by_task = {task: 100 * table.score(plan, f"{task}/{length}")["drop"] for task in TASKS}
        drop = table.mean(Dense(), length) - table.mean(plan, length)
        rows.append(common.row(f"ablation/5/{name_of(length)}/{name}", drop, "points", detail={"by_task": by_task}))
    return rows


if __name__ == "__main__":
    main()
