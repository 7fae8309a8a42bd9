"""`benchmarks.accuracy --margins`: MAGE's margin over the baseline that is nearest to it, on many samples.

From 5 % on MAGE and Quest both answer as dense attention does, so their difference is a few words in hundreds, and 64
samples say nothing about its sign. Here both answer the same samples and nobody else does: dense attention has no part
in the margin. Tasks whose answers differ get more samples (`OFTEN`), each task counts alike in the mean, and intervals
are of paired differences.

The goal's row is the worst margin of all baselines, budgets and lengths. Where two plans are alike its sign is a
coin's, and the worst of several such is below zero more often than not: each case has its interval beside it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.accuracy_rows import BASELINES, BUDGETS, GOALS, mage, name_of
from herald_jax.eval_report import describe, mean_of_groups
from herald_jax.plans import Plan
from herald_jax.tasks import TASKS

ROW = "mage/worst_margin_over_baselines"
NEAREST = "quest"
# Budgets at which the nearest baseline loses no more than noise.
CLOSE = BUDGETS[1:]
# Batches of a round, one of the others: about as the differences vary.
OFTEN = {"common_words": 3, "variable_tracking": 2, "fact_qa": 2}


def share(lengths: Sequence[int], part: int, processes: int) -> tuple[list[Plan], list[int]]:
    """The plans and lengths of one process. Four of them have a budget and a length each, two a length."""
    cases = list(itertools.product(CLOSE, lengths))[part::processes]
    budgets = sorted({budget for budget, _ in cases})
    plans: list[Plan] = [mage(b, selector=name) for b in budgets for name in ("mage", NEAREST)]
    return plans, sorted({length for _, length in cases})


def landed(path: Path, lengths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Margins by case that the rows of a results file give: the differences of its drops, which have no interval."""
    if not path.exists():
        return {}
    rows = {row["id"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    found = {}
    for name, budget, length in itertools.product(BASELINES, BUDGETS, lengths):
        theirs, ours = (rows.get(f"{kind}/{round(100 * budget)}/{name_of(length)}/drop") for kind in (name, "mage"))
        if ours is not None and theirs is not None:
            found[case_of(name, budget, length)] = {"margin": theirs["value"] - ours["value"]}
    return found


def case_of(baseline: str, budget: float, length: int) -> str:
    return f"{baseline}/{round(100 * budget)}/{name_of(length)}"


def rows(
    answers: Sequence[Mapping[str, Any]], lengths: Sequence[int], others: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row per case that has answers of every task, and the goal's: the worst of them and of the `others`."""
    scores: dict[tuple[str, str], dict[int, float]] = {}
    for answer in answers:
        scores.setdefault((answer["plan"], answer["set"]), {})[answer["index"]] = answer["score"]
    made, margins = [], dict(others)
    for budget, length in itertools.product(CLOSE, lengths):
        ours, theirs = describe(mage(budget)), describe(mage(budget, selector=NEAREST))
        pairs = {}
        for task in TASKS:
            a, b = (scores.get((plan, f"{task}/{length}"), {}) for plan in (ours, theirs))
            pairs[task] = [100 * (a[i] - b[i]) for i in sorted(a.keys() & b.keys())]
        if not all(pairs.values()):
            continue
        margin, low, high = mean_of_groups(list(pairs.values()))
        case = case_of(NEAREST, budget, length)
        samples = {task: len(values) for task, values in pairs.items()}
        by_task = {task: float(np.mean(values)) for task, values in pairs.items()}
        margins[case] = {"margin": margin, "low": low, "high": high, "samples": min(samples.values())}
        detail = {"low": low, "high": high, "samples": samples, "by_task": by_task}
        made.append(common.row(f"margin/{case}", margin, "points", detail=detail))
    if not made:
        return []
    worst = min(margins, key=lambda case: margins[case]["margin"])
    detail = {"worst": worst, **margins[worst], "all": margins}
    made.append(common.row(ROW, detail.pop("margin"), "points", goal=GOALS[ROW], detail=detail))
    return made
