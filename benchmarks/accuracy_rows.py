"""What `benchmarks.accuracy` asks: which plans, and which rows their answers make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import common
from herald_jax.eval_report import describe
from herald_jax.plans import Dense, Herald, Mage, Plan
from herald_jax.tasks import TASKS

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
    near = {"sinks": 4, "recent": 32}
    changes: list[dict[str, Any]] = [
        {},
        {"page_size": 1},
        {"dense_layers": 0},
        {"page_size": 16},
        {"page_size": 4},
        {"rest": "keep"},
        {"rest": "keep", "page_size": 1},
        {"select_at_step": 2},
        {"reduce": "max"},
        {"query": "center"},
        near,
        {"normalise": "prefix"},
        {"allocate": "layer_adaptive"},
    ]
    found: dict[str, Plan] = {named(change): mage(0.05, **change) for change in changes}
    if herald:
        changes = [
            {},
            {"page_size": 1},
            {"query": "center"},
            {"query": "center", "page_size": 1},
            {"page_size": 8},
            {"query": "all"},
            near,
            {"dense_layers": 1},
            {"draft_at": 0.25},
            {"query": "all", "draft": False},
        ]
        found |= {f"herald {named(change)}": Herald(budget=0.05, min_budget=1, **change) for change in changes}
    return found


def named(change: dict[str, Any]) -> str:
    """An ablation's row by what it changes: "sinks=4,recent=32", or "default"."""
    return ",".join(f"{name}={value}" for name, value in change.items()) or "default"


def name_of(length: int) -> str:
    return f"{length // 1024}k"


class Table:
    """The results by (plan, set) and (plan, group)."""

    def __init__(self, summary: dict[str, Any]):
        self.rows = {(row["plan"], row["set"]): row for row in summary["rows"]}
        self.means = {(row["plan"], row["group"]): row for row in summary["means"]}

    def mean(self, plan: Plan, length: int) -> float:
        return 100 * self.means[describe(plan), str(length)]["score"]

    def drop(self, plan: Plan, length: int) -> dict[str, float]:
        """Points of the task mean below dense, with the paired interval, and how many steps a block took."""
        mean = self.means[describe(plan), str(length)]
        sets = [row for (label, _), row in self.rows.items() if label == mean["plan"] and row["group"] == str(length)]
        steps = sum(row["steps_per_block"] for row in sets) / len(sets)
        return {
            "drop": 100 * mean["drop"],
            "low": 100 * mean["drop_low"],
            "high": 100 * mean["drop_high"],
            "steps_per_block": steps,
        }

    def score(self, plan: Plan, name: str) -> dict[str, Any]:
        return self.rows[describe(plan), name]


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
            whole = table.drop(plan, length)
            add(id, whole.pop("drop"), "points", {**whole, "by_task": by_task})
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
    recalls = [r for r in (table.score(five, name)["recall"] for name in sets) if r is not None]
    if recalls:
        masses = [
            table.score(five, name)["mass_kept"] for name in sets if table.score(five, name)["recall"] is not None
        ]
        add("mage/5/recall", sum(recalls) / len(recalls), "", {"mass_kept": sum(masses) / len(masses)})
    return rows


def threshold_rows(table: Table, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of MAGE at 5 % beside dense when a step reveals whatever is certain."""
    plans, sets = (mage(0.05), Dense()), [f"{task}/{length}" for task in TASKS for length in lengths]
    ours, dense = (sum(table.score(plan, name)["steps_per_block"] for name in sets) / len(sets) for plan in plans)
    detail = {"mage_steps_per_block": ours, "dense_steps_per_block": dense}
    rows = [
        common.row("mage/5/steps_ratio", ours / max(dense, 1e-9), "x", goal=GOALS["mage/5/steps_ratio"], detail=detail)
    ]
    for length in lengths:
        found = table.drop(plans[0], length)
        detail = {**found, "dense_mean": table.mean(Dense(), length)}
        rows.append(common.row(f"mage/5/{name_of(length)}/threshold_drop", detail.pop("drop"), "points", detail=detail))
    return rows


def ablation_rows(table: Table, found: dict[str, Plan], length: int) -> list[dict[str, Any]]:
    """One row per case that has been answered, and what the best of MAGE's loses on aggregation."""
    rows = []
    found = {name: plan for name, plan in found.items() if (describe(plan), str(length)) in table.means}
    for name, plan in found.items():
        by_task = {task: 100 * table.score(plan, f"{task}/{length}")["drop"] for task in TASKS}
        samples = min(table.score(plan, f"{task}/{length}")["samples"] for task in TASKS)
        whole = table.drop(plan, length)
        drop = whole.pop("drop")
        detail = {**whole, "samples": samples, "by_task": by_task}
        rows.append(common.row(f"ablation/5/{name_of(length)}/{name}", drop, "points", detail=detail))
    lost = {
        name: 100 * table.score(plan, f"common_words/{length}")["drop"]
        for name, plan in found.items()
        if isinstance(plan, Mage)
    }
    if lost:
        best = min(lost, key=lambda name: lost[name])
        goal = GOALS["mage/5/aggregation/drop"]
        rows.append(common.row("mage/5/aggregation/best_drop", lost[best], "points", goal=goal, detail={"with": best}))
    return rows
