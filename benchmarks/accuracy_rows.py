"""What `benchmarks.accuracy` asks: which plans, and which rows their answers make."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import common
from herald_jax.eval_report import RESAMPLES, describe, mean_of_groups
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


# What also answers under the threshold policy.
CERTAIN: list[Plan] = [Dense(), mage(0.05)]
# The paper's own cases of recall: so many entries, chosen one by one. It gives 84 and 86 % for these.
PAPERS = Mage(budget=512, min_budget=1, page_size=1, measure=True)
RECALLED: dict[str, Mage] = {
    "mage/5/recall": mage(0.05, measure=True),
    "mage/512/recall": PAPERS,
    "mage/1024/recall": dataclasses.replace(PAPERS, budget=1024),
}


def plans(*, herald: bool) -> list[Plan]:
    """Dense, MAGE, the baselines and, if wanted, HERALD, each at every budget; and MAGE with the paper's budget."""
    found: list[Plan] = [Dense(), *(mage(b, measure=b == 0.05) for b in BUDGETS)]
    found += [mage(b, selector=name) for name in BASELINES for b in BUDGETS]
    found.append(PAPERS)
    if herald:
        found += [Herald(budget=b, min_budget=1) for b in BUDGETS[1:]]
    return found


def replays(*, herald: bool) -> list[Plan]:
    """What is also replayed with the dense plan's tokens forced."""
    found: list[Plan] = [mage(0.05)]
    return [*found, Herald(budget=0.05, min_budget=1)] if herald else found


def shares(chosen: Sequence[Plan], processes: int) -> list[tuple[list[Plan], bool]]:
    """The plans of each process, and whether it answers all samples or one round.

    One round is enough where a plan is tens of points behind, and for the recall of many steps.
    """
    few: list[Plan] = [p for p in chosen if p == PAPERS or (isinstance(p, Mage) and p.selector in ("tidal", "recent"))]
    many = [p for p in chosen if p not in few]
    if processes == 1:
        return [(list(chosen), True)]
    rest = min(len(many), processes - max(1, processes // 5))
    aside = processes - rest
    return [(many[i::rest], True) for i in range(rest)] + [(few[i::aside], False) for i in range(aside)]


def finetuned_plans() -> list[Plan]:
    """Dense and MAGE at 2 %, with entries chosen one by one: the default pages leave this model no gap to close."""
    return [Dense(), mage(0.02, page_size=1)]


def ablation_shares(chosen: Sequence[Plan], processes: int) -> list[list[Plan]]:
    """The plans of each process. HERALD's go into a quarter of them: each scans on every core it may use."""
    herald: list[Plan] = [plan for plan in chosen if isinstance(plan, Herald)]
    others: list[Plan] = [plan for plan in chosen if not isinstance(plan, Herald)]
    if not herald or processes == 1:
        return [list(chosen[i::processes]) for i in range(processes)]
    rest = min(len(others), processes - max(1, processes // 4))
    aside = processes - rest
    return [others[i::rest] for i in range(rest)] + [herald[i::aside] for i in range(aside)]


def ablations(of: str, *, budgets: Sequence[float] = (0.05,), only: Sequence[str] | None = None) -> dict[str, Plan]:
    """The ablation's cases, each by its budget and what it changes: "5/query=center".

    `of` is "mage", "herald" or "both"; `only` names the changes that are wanted. Raises SystemExit for an unknown one.
    """
    near = {"sinks": 4, "recent": 32}
    changes: list[dict[str, Any]] = [
        {},
        {"page_size": 1},
        {"page_size": 16},
        {"dense_layers": 0},
        {"dense_layers": 1},
        {"page_size": 16, "dense_layers": 0},
        {"query": "center"},
        {"query": "first"},
        {"reduce": "max"},
        {"normalise": "prefix"},
        {"select_at_step": 2},
        {"rest": "keep"},
        {"allocate": "layer_adaptive"},
        near,
    ]
    makers: dict[str, Callable[[float], Plan]] = {}
    if of != "herald":
        makers = {named(change): functools.partial(mage, **change) for change in changes}
    if of != "mage":
        changes = [
            {},
            {"draft_at": 0.0},
            {"draft_at": 0.25},
            {"page_size": 8},
            {"query": "center"},
            {"query": "all"},
            {"dense_layers": 1},
            {"draft": False},
            {"keep_bonus": 0.0},
            {"keep_bonus": 0.5},
            {"keep_bonus": 1.0},
        ]
        herald = functools.partial(Herald, min_budget=1)
        makers |= {f"herald {named(change)}": functools.partial(herald, **change) for change in changes}
    if unknown := set(only or ()) - makers.keys():
        raise SystemExit(f"error: no ablation is named {unknown.pop()!r}; there are: {'; '.join(makers)}")
    wanted = {name: make for name, make in makers.items() if only is None or name in only}
    return {f"{round(100 * budget)}/{name}": make(budget) for budget in budgets for name, make in wanted.items()}


def named(change: dict[str, Any]) -> str:
    """An ablation's row by what it changes: "sinks=4,recent=32", or "default"."""
    return ",".join(f"{name}={value}" for name, value in change.items()) or "default"


def name_of(length: int) -> str:
    return f"{length // 1024}k"


class Table:
    """The results by (plan, set) and (plan, group), and every sample's score by (plan, set) and index."""

    def __init__(self, summary: dict[str, Any], answers: Sequence[dict[str, Any]]):
        self.rows = {(row["plan"], row["set"]): row for row in summary["rows"]}
        self.means = {(row["plan"], row["group"]): row for row in summary["means"]}
        self.scores: dict[tuple[str, str], dict[int, float]] = {}
        for answer in answers:
            if "agreement" not in answer:
                self.scores.setdefault((answer["plan"], answer["set"]), {})[answer["index"]] = answer["score"]

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
            "samples": min(row["samples"] for row in sets),
            "steps_per_block": steps,
        }

    def differences(self, ours: Plan, theirs: Plan, length: int) -> list[list[float]]:
        """By task, `ours` minus `theirs` on the samples that both have answered, in points."""
        made = []
        for task in TASKS:
            a, b = (self.scores[describe(plan), f"{task}/{length}"] for plan in (ours, theirs))
            made.append([100 * (a[i] - b[i]) for i in sorted(a.keys() & b.keys())])
        return made

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
            if plan == PAPERS:
                continue
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
    margins: dict[str, dict[str, Any]] = {}
    for length in lengths:
        for budget in BUDGETS:
            for name in BASELINES:
                pairs = table.differences(mage(budget), mage(budget, selector=name), length)
                margin, low, high = mean_of_groups(pairs)
                margins[f"{name}/{round(100 * budget)}/{name_of(length)}"] = {
                    "margin": margin, "low": low, "high": high, "samples": min(map(len, pairs))
                }  # fmt: skip
    worst = min(margins, key=lambda case: margins[case]["margin"])
    detail = {"worst": worst, **margins[worst], "all": margins}
    add("mage/worst_margin_over_baselines", detail.pop("margin"), "points", detail)
    five = mage(0.05)
    sets = [f"{task}/{length}" for task in TASKS for length in lengths]
    drops = {name_of(n): 100 * table.score(five, f"common_words/{n}")["drop"] for n in lengths}
    add("mage/5/aggregation/drop", max(drops.values()), "points", drops)
    for plan in replays(herald=any(isinstance(plan, Herald) for plan in chosen)):
        agreed = {
            name: row["replay_agreement"] for name in sets if "replay_agreement" in (row := table.score(plan, name))
        }
        if agreed:
            id = f"{type(plan).__name__.lower()}/5/replay_agreement"
            add(id, 100 * sum(agreed.values()) / len(agreed), "%", {"by_task": agreed})
    return rows + recall_rows(table, lengths)


def recall_rows(table: Table, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """What the first step's set keeps of what later steps' blocks would choose, for the plans that have answered."""
    rows = []
    sets = [f"{task}/{length}" for task in TASKS for length in lengths]
    for id, plan in RECALLED.items():
        found = {name: table.score(plan, name) for name in sets if (describe(plan), name) in table.rows}
        measured = [row for row in found.values() if row["recall"] is not None]
        if measured:
            detail: dict[str, Any] = {
                kind: sum(row[kind] for row in measured) / len(measured) for kind in ("recall", "mass_kept")
            }
            detail["samples"] = min(row["samples"] for row in measured)
            detail["by_task"] = {name: row["recall"] for name, row in found.items()}
            rows.append(common.row(id, detail.pop("recall"), "", goal=GOALS.get(id), detail=detail))
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


def ablation_rows(table: Table, found: dict[str, Plan], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """One row per case that has been answered, and what the best of MAGE's at 5 % loses on aggregation.

    Each says how many points it is ahead of the first case of its budget and kind, on the samples that both have.
    """
    rows = []
    lost: dict[str, float] = {}
    for length in lengths:
        firsts: dict[tuple[str, type[Plan]], tuple[str, Plan]] = {}
        for case, plan in found.items():
            if (describe(plan), str(length)) not in table.means:
                continue
            budget, name = case.split("/", 1)
            by_task = {task: 100 * table.score(plan, f"{task}/{length}")["drop"] for task in TASKS}
            whole: dict[str, Any] = table.drop(plan, length)
            other, base = firsts.setdefault((budget, type(plan)), (name, plan))
            if base != plan:
                ahead, low, high = mean_of_groups(table.differences(plan, base, length))
                whole["ahead"] = {"of": other, "points": ahead, "low": low, "high": high}
            id = f"ablation/{budget}/{name_of(length)}/{name}"
            rows.append(common.row(id, whole.pop("drop"), "points", detail={**whole, "by_task": by_task}))
            if isinstance(plan, Mage) and budget == "5" and length == lengths[0]:
                lost[name] = by_task["common_words"]
    if lost:
        best = min(lost, key=lambda name: lost[name])
        goal = GOALS["mage/5/aggregation/drop"]
        rows.append(common.row("mage/5/aggregation/best_drop", lost[best], "points", goal=goal, detail={"with": best}))
    return rows


def finetuned_rows(before: Table, after: Table, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """The share of the gap at 2 % that is closed, with a paired interval; no row where there is no gap."""
    dense, sparse = finetuned_plans()

    def groups(table: Table, plan: Plan) -> list[np.ndarray]:
        found = [table.scores[describe(plan), f"{task}/{n}"] for n in lengths for task in TASKS]
        return [100 * np.array([scores[i] for i in sorted(scores)]) for scores in found]

    names = {"dense_before": (before, dense), "mage_before": (before, sparse),
             "dense_after": (after, dense), "mage_after": (after, sparse)}  # fmt: skip
    made = {name: groups(*which) for name, which in names.items()}
    means = {name: float(np.mean([np.mean(group) for group in found])) for name, found in made.items()}
    gap, left = (means["dense_before"] - means[name] for name in ("mage_before", "mage_after"))
    detail: dict[str, Any] = {"gap_before": gap, "gap_after": left, "dense_after": means["dense_after"]}
    detail["samples"] = min(len(group) for found in made.values() for group in found)
    # The same resampled samples for all three; the ratio's percentiles.
    rng = np.random.default_rng(0)
    drawn = np.zeros((3, RESAMPLES))
    for three in zip(made["dense_before"], made["mage_before"], made["mage_after"], strict=True):
        which = rng.integers(0, len(three[0]), (RESAMPLES, len(three[0])))
        drawn += [group[which].mean(axis=1) / len(made["dense_before"]) for group in three]
    gaps = drawn[0] - drawn[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        closed = np.where(gaps > 0, (drawn[2] - drawn[1]) / gaps, -np.inf)  # a gap of nothing closes nothing
    detail["low"], detail["high"] = (float(x) for x in np.nanpercentile(np.clip(closed, -99, 99), [2.5, 97.5]))
    for length in lengths:
        for name, table in (("before", before), ("after", after)):
            detail[f"{name}/{name_of(length)}"] = {
                "dense": table.mean(dense, length),
                "mage": table.mean(sparse, length),
                "by_task": {task: 100 * table.score(sparse, f"{task}/{length}")["score"] for task in TASKS},
                "dense_by_task": {task: 100 * table.score(dense, f"{task}/{length}")["score"] for task in TASKS},
            }
    if gap <= 0:
        print(f"MAGE at 2 % loses nothing before fine-tuning ({-gap:.2f} points above dense): no share of a gap")
        return []
    return [common.row("finetune/2/gap_closed", 1 - left / gap, "", goal=GOALS["finetune/2/gap_closed"], detail=detail)]
