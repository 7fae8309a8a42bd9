"""The accuracy benchmark's rows, from a table made by hand."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accuracy_margins, accuracy_parts, accuracy_rows, accuracy_tables
from herald_jax import eval_report
from herald_jax.eval_report import describe
from herald_jax.evaluate import Journal
from herald_jax.plans import Dense, Mage
from herald_jax.tasks import TASKS


def table_of(score: Any) -> accuracy_rows.Table:
    """Every plan at every length, two samples of each; `score(plan, task, length)`."""
    rows, means, answers = [], [], []
    for plan in accuracy_rows.plans(herald=True):
        for length in (4096, 8192):
            found = {task: score(plan, task, length) for task in TASKS}
            dense = {task: score(Dense(), task, length) for task in TASKS}
            mean = {"plan": describe(plan), "group": str(length), "score": sum(found.values()) / 7}
            mean |= {"low": 0.0, "high": 1.0, "drop": sum(dense.values()) / 7 - sum(found.values()) / 7}
            means.append(mean | {"drop_low": -0.01, "drop_high": 0.09})
            for task, value in found.items():
                both = {"plan": describe(plan), "set": f"{task}/{length}"}
                answers += [both | {"index": index, "score": value} for index in range(2)]
                row = {"plan": describe(plan), "set": f"{task}/{length}", "score": value, "low": 0.0, "high": 1.0}
                row |= {"group": str(length), "samples": 10, "steps_per_block": 3.0 if isinstance(plan, Mage) else 2.0}
                row |= {"drop": dense[task] - value, "drop_low": 0.0, "drop_high": 1.0}
                row |= {"recall": 0.9 if getattr(plan, "measure", False) else None, "mass_kept": 0.8}
                if plan == accuracy_rows.mage(0.05, measure=True):
                    row["replay_agreement"] = 1.0 if length == 4096 else 0.9
                rows.append(row)
    return accuracy_rows.Table({"rows": rows, "means": means}, answers)


def test_rows() -> None:
    def score(plan: Any, task: str, length: int) -> float:
        if isinstance(plan, Dense):
            return 0.96 if length == 4096 else 0.9
        ours = isinstance(plan, Mage) and plan.selector == "mage"
        value = 0.9 + plan.budget / 2 if length == 4096 else 0.8
        value -= 0.0 if ours else 0.1
        return value - (0.07 if task == "common_words" else 0.0)

    chosen = accuracy_rows.plans(herald=True)
    made = accuracy_rows.accuracy_rows(table_of(score), chosen, [4096, 8192])
    rows = {row["id"]: row for row in made}
    assert len(rows) == len(made)
    assert rows["dense/4k/mean"]["value"] == pytest.approx(96)
    assert rows["dense/4k/mean"]["met"]
    # 96 - (90 + 2.5 - 7 / 7) points
    assert rows["mage/5/4k/drop"]["value"] == pytest.approx(4.5)
    assert not rows["mage/5/4k/drop"]["met"]
    assert rows["mage/5/4k/drop"]["detail"]["high"] == pytest.approx(9)
    assert rows["mage/5/4k/drop"]["detail"]["steps_per_block"] == pytest.approx(3)
    assert rows["herald/10/8k/drop"]["value"] == pytest.approx(90 - (70 - 1))
    assert rows["mage/5/replay_agreement"]["value"] == pytest.approx(95)
    margin = rows["mage/worst_margin_over_baselines"]
    assert margin["value"] == pytest.approx(10)
    assert margin["detail"]["samples"] == 2
    assert margin["detail"]["low"] == pytest.approx(10)
    assert len(margin["detail"]["all"]) == 2 * 3 * 3
    assert rows["mage/5/aggregation/drop"]["value"] == pytest.approx(100 * (0.9 - 0.73))
    assert rows["mage/5/recall"]["value"] == rows["mage/512/recall"]["value"] == pytest.approx(0.9)
    assert set(accuracy_rows.GOALS) - set(rows) == {"finetune/2/gap_closed", "mage/5/steps_ratio"}
    ratio, *drops = accuracy_rows.threshold_rows(table_of(score), [4096, 8192])
    assert ratio["value"] == pytest.approx(1.5)
    assert not ratio["met"]
    assert [row["value"] for row in drops] == pytest.approx([rows[f"mage/5/{n}k/drop"]["value"] for n in (4, 8)])
    assert "quest/2/4k/drop" in rows


@pytest.mark.parametrize("processes", [1, 4, 12])
def test_every_plan_has_one_process(processes: int) -> None:
    plans = accuracy_rows.plans(herald=True)
    made = accuracy_rows.shares(plans, processes)
    assert len(made) == processes
    assert sorted(describe(plan) for chosen, _ in made for plan in chosen) == sorted(map(describe, plans))
    assert all(every or Dense() not in chosen for chosen, every in made)
    cases = [Dense(), *accuracy_rows.ablations("both").values()]
    shared = accuracy_rows.ablation_shares(cases, processes)
    assert len(shared) == processes
    assert all(shared)
    assert sorted(map(describe, cases)) == sorted(describe(plan) for chosen in shared for plan in chosen)


def test_what_fine_tuning_gains() -> None:
    """Of ten samples MAGE misses four before, and one after; the dense plan misses none, and one after."""
    dense, sparse = accuracy_rows.finetuned_plans()

    def of(*missed: int) -> accuracy_rows.Table:
        answers = [
            {"plan": describe(plan), "set": f"{task}/4096", "index": i, "score": float(i >= n)}
            for plan, n in zip((dense, sparse), missed, strict=True) for task in TASKS for i in range(10)
        ]  # fmt: skip
        batches: list[dict[str, Any]] = []
        names = {f"{task}/4096": "4096" for task in TASKS}
        return accuracy_rows.Table(eval_report.summarise([dense, sparse], names, answers, batches), answers)

    (row,) = accuracy_rows.finetuned_rows(of(0, 4), of(1, 1), [4096])
    assert row["value"] == pytest.approx(0.75)
    assert row["met"]
    detail = row["detail"]
    assert [detail[name] for name in ("gap_before", "gap_after", "dense_after")] == pytest.approx([40, 10, 90])
    assert 0.5 < detail["low"] < 0.75 < detail["high"] < 1
    assert accuracy_rows.finetuned_rows(of(4, 4), of(4, 0), [4096]) == []


def test_ablation_changes_one_thing_at_a_time() -> None:
    found = accuracy_rows.ablations("both")
    assert found == accuracy_rows.ablations("mage") | accuracy_rows.ablations("herald")
    labels = [describe(plan) for plan in found.values()]
    assert len(set(labels)) == len(labels)
    assert next(iter(found)) == "5/default"
    few = accuracy_rows.ablations("mage", budgets=[0.02, 0.1], only=["query=center"])
    assert few == {f"{n}/query=center": accuracy_rows.mage(n / 100, query="center") for n in (2, 10)}
    with pytest.raises(SystemExit, match="no ablation is named 'query=middle'"):
        accuracy_rows.ablations("mage", only=["query=middle"])
    assert all(plan.budget == 0.05 and plan.min_budget == 1 for plan in found.values())


def test_an_ablations_cases_are_compared_with_its_first_on_the_samples_that_both_have() -> None:
    """Of ten samples the first case misses two, the second, which has answered four, one of the two and another."""
    found = accuracy_rows.ablations("herald", only=["herald keep_bonus=0.0", "herald keep_bonus=0.5"])
    plain, kept = found.values()
    missed = {Dense(): (10, ()), plain: (10, (0, 1)), kept: (4, (1, 2))}
    answers = [
        {"plan": describe(plan), "set": f"{task}/4096", "index": i, "score": float(i not in which)}
        for plan, (count, which) in missed.items() for task in TASKS for i in range(count)
    ]  # fmt: skip
    batches: list[dict[str, Any]] = []
    names = {f"{task}/4096": "4096" for task in TASKS}
    table = accuracy_rows.Table(eval_report.summarise(list(missed), names, answers, batches), answers)
    first, second = accuracy_rows.ablation_rows(table, found, [4096])
    assert [first["id"], second["id"]] == [f"ablation/5/4k/herald keep_bonus={bonus}" for bonus in (0.0, 0.5)]
    assert first["value"] == pytest.approx(20)
    assert "ahead" not in first["detail"]
    ahead = second["detail"]["ahead"]
    assert ahead["of"] == "herald keep_bonus=0.0"
    assert ahead["points"] == pytest.approx(0)
    assert ahead["low"] < 0 < ahead["high"]


def row(id: str, value: float, **detail: Any) -> dict[str, Any]:
    return {"id": id, "value": value, "unit": "%", "detail": detail}


ROWS = [
    row("dense/4k/mean", 91.23, low=90.0, high=92.0), row("dense/4k/fact_qa", 99.5, samples=128),
    row("dense/8k/mean", 85.0, low=80.0, high=90.0), row("dense/8k/fact_qa", 97.0, samples=64),
    row("mage/5/4k/drop", 0.44, low=-0.2, high=1.0, by_task={}),
    row("mage/5/8k/drop", 1.0, low=0.5, high=1.5, samples=32, by_task={}),
    row("mage/5/aggregation/drop", 3.0), row("finetune/2/gap_closed", 0.5) | {"goal": ">=0.5", "met": True},
    row("smollm2/1k/dense", 90.0, low=75.0, high=100.0, samples=20),
    row("smollm2/1k/mage/10", 85.0, low=70.0, high=100.0),
    row("ablation/5/4k/query=first", 1.5, low=1.0, high=2.0, steps_per_block=3.21, samples=9, by_task={"fact_qa": 0.7}),
    row("ablation/5/4k/reduce=max", 2.5, low=1.0, high=3.0, steps_per_block=3.21, samples=9, by_task={"fact_qa": 0.8}),
    row("ablation/2/8k/reduce=max", 3.5, low=1.0, high=4.0, steps_per_block=3.21, samples=9, by_task={"fact_qa": 0.9}),
]  # fmt: skip


def test_parts_are_ended_in_time_and_their_journals_become_one_table(tmp_path: Path) -> None:
    script = "import sys, time; time.sleep(int(sys.argv[-1]) * 100); sys.exit(3)"
    ended = accuracy_parts.run([sys.executable, "-c", script], 2, time.monotonic() + 2)
    assert ended == [3, -signal.SIGTERM]

    plans, names = [Dense(), accuracy_rows.mage(0.05), accuracy_rows.mage(0.1)], {"a/8": "8", "b/8": "8"}
    counts = dict.fromkeys(("denoise_steps", "blocks", "sparse_blocks", "recall_sum", "mass_sum", "measured"), 1)
    settings = {"checkpoint": "x", "batch_size": 2}
    for part, mine in enumerate((plans[::2], plans[1:2])):
        journal = Journal(accuracy_parts.folder(tmp_path, part), settings)
        for plan in mine:
            for name in names if plan != plans[2] else ["a/8"]:  # the third has not answered everything
                for first in (0, 2) if plan == plans[0] else (0,):
                    score = 0.25 if plan != plans[0] else 1.0 if first == 0 else 0.0
                    answers = [{"index": first + i, "score": score, "answer": "", "tokens": 1} for i in range(2)]
                    journal.answered(describe(plan), name, answers, counts | {"new_tokens": 2})
        if part == 1:  # the dense plan's once more, as for a replay
            again = {"index": 0, "score": 1.0, "answer": "", "tokens": 1}
            journal.answered(describe(plans[0]), "a/8", [again], counts | {"new_tokens": 1})
        journal.close()
    table, samples = accuracy_parts.gather(tmp_path, 2, settings, plans, names)
    assert samples == {describe(plans[0]): 4, describe(plans[1]): 2}
    assert {plan for plan, _ in table.means} == {describe(plan) for plan in plans[:2]}
    assert table.mean(plans[0], 8) == 50  # of four samples
    assert table.drop(plans[1], 8)["drop"] == pytest.approx(75)  # of the two that both have answered
    assert accuracy_parts.gather(tmp_path, 2, settings, plans, names, 2)[0].mean(plans[0], 8) == 100
    assert accuracy_parts.gather(tmp_path, 1, settings, plans[1:], names)[1] == {}


def test_tables(tmp_path: Path) -> None:
    """Every row is in exactly one of the page's tables."""
    report = {"device": "NVIDIA H200", "date": "2026-11-30T01:02:03Z", "rows": ROWS}
    (tmp_path / "accuracy-h200.json").write_text(json.dumps(report))
    text = accuracy_tables.tables(tmp_path)
    assert "on NVIDIA H200, 2026-11-30: at least 64 samples" in text
    assert (
        "| task | 4K tokens | 8K tokens |\n|---|---:|---:|\n| fact qa | 99.5 | 97.0 |\n| **mean** | 91.2 | 85.0 |"
        in text
    )
    assert "| mage, 5 % | 0.4 (-0.2 to 1.0) | 1.0 (0.5 to 1.5) | 32 |" in text
    assert "| `mage/5/aggregation/drop` | 3 % |  |  |\n| `finetune/2/gap_closed` | 0.5 % | >=0.5 | met |" in text
    assert "| `mage/10` | 85.0 (70.0 to 100.0) |" in text
    assert "20 samples each, on NVIDIA H200." in text
    assert "At 5 % and 4K tokens:\n\n| changed |" in text
    assert "| query=first | 1.5 (1.0 to 2.0) | 3.2 | 9 | 0.7 |" in text
    assert "At other budgets and lengths:\n\n| changed |" in text
    assert "| reduce=max, 2 % and 8K tokens | 3.5 (1.0 to 4.0) |" in text
    assert accuracy_tables.tables(tmp_path / "empty") == "Not measured yet.\n"
    with pytest.raises(SystemExit, match="no row"):
        accuracy_tables.scores(report | {"rows": ROWS[4:]})


def test_the_page_is_up_to_date() -> None:
    assert accuracy_tables.main(["--check"]) == 0, "run python -m benchmarks.accuracy_tables"


def test_margins(tmp_path: Path) -> None:
    """Paired differences of samples that both have answered, tasks alike; the worst of them and of what is landed."""
    ours, theirs = (describe(accuracy_rows.mage(0.05, selector=name)) for name in ("mage", "quest"))
    answers = []
    for task in TASKS:
        scores = [0.5, 1.0, 1.0] if task == "common_words" else [1.0]
        for index, score in enumerate(scores):
            answers.append({"plan": ours, "set": f"{task}/4096", "index": index, "score": score})
        for index in range(2):
            answers.append({"plan": theirs, "set": f"{task}/4096", "index": index, "score": 1.0})
    drops = [("mage/10/4k", 0.5), ("quest/10/4k", -0.5), ("mage/5/4k", 0.0), ("quest/5/4k", 9.0), ("tidal/5/4k", 30.0)]
    path = tmp_path / "accuracy.json"
    path.write_text(json.dumps({"rows": [row(f"{id}/drop", value) for id, value in drops]}))
    assert accuracy_margins.landed(tmp_path / "none.json", [4096]) == {}
    landed = accuracy_margins.landed(path, [4096, 8192])
    assert landed == {"quest/10/4k": {"margin": -1}, "quest/5/4k": {"margin": 9}, "tidal/5/4k": {"margin": 30}}
    case, goal = accuracy_margins.rows(answers, [4096, 8192], landed)
    assert case["id"] == "margin/quest/5/4k"
    assert case["value"] == pytest.approx(-25 / 7, abs=1e-3)
    assert case["detail"]["samples"] == dict.fromkeys(TASKS, 1) | {"common_words": 2}
    assert case["detail"]["low"] <= case["value"] <= case["detail"]["high"]
    assert (goal["id"], goal["value"], goal["met"]) == (accuracy_margins.ROW, case["value"], False)
    assert goal["detail"]["worst"] == "quest/5/4k"
    assert goal["detail"]["all"]["tidal/5/4k"] == {"margin": 30}
    assert accuracy_margins.rows(answers[1:], [4096], landed) == []  # a task without a pair
    report = {"device": "NVIDIA H200", "date": "2026-11-30T01:02:03Z", "rows": [*ROWS, case, goal]}
    path.write_text(json.dumps(report))
    text = accuracy_tables.tables(tmp_path)
    assert "| quest, 5 %, 4K | -3.57 (-7.14 to 0.00) | 1 to 2 | common words, -25.0 |" in text
    assert "`margin/" not in text
    assert "| `mage/worst_margin_over_baselines` | -3.571 points | >=0 |" in text


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_margin_has_one_process(processes: int) -> None:
    found = [accuracy_margins.share([4096, 8192], part, processes) for part in range(processes)]
    cases = [(plan, length) for plans, lengths in found for plan in plans for length in lengths]
    assert len(cases) == len(set(cases)) == 2 * 2 * 2
