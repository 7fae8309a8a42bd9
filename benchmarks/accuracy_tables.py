"""`python -m benchmarks.accuracy_tables`: the tables of docs/accuracy.md, from results/accuracy*.json, never typed.

With `--check` nothing is written and the status is 1 if the page is out of date. The model card's table (`scores`) is
made here too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.generated import replace_between, update
from benchmarks.readme_table import RESULTS, ROOT, VERDICTS

PAGE = ROOT / "docs" / "accuracy.md"
BEGIN, END = "<!-- tables: begin (made by `python -m benchmarks.accuracy_tables`) -->", "<!-- tables: end -->"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    ruler = "|" + "|".join(["---", *["---:"] * (len(head) - 1)]) + "|"
    return ["| " + " | ".join(head) + " |", ruler, *("| " + " | ".join(line) + " |" for line in lines)]


def _interval(row: dict[str, Any]) -> str:
    detail = row["detail"]
    return f"{row['value']:.1f} ({detail['low']:.1f} to {detail['high']:.1f})"


def scores(results: dict[str, Any]) -> str:
    """Dense scores by task and length, and what sparse plans lose, from a results file of `benchmarks.accuracy`.

    Raises SystemExit for a file without them.
    """
    rows = {row["id"]: row for row in results["rows"]}
    dense = [id.split("/")[1:] for id in rows if id.startswith("dense/")]
    lengths = list(dict.fromkeys(length for length, _ in dense))
    names = [name for name in dict.fromkeys(name for _, name in dense) if name != "mean"]
    if not names:
        raise SystemExit(
            'error: the results file has no row "dense/..."; give one that benchmarks.accuracy has written'
        )
    columns = [f"{length.upper()} tokens" for length in lengths]
    samples = min(rows[f"dense/{length}/{name}"]["detail"]["samples"] for length in lengths for name in names)
    tasks = [
        [label, *(f"{rows[f'dense/{length}/{name}']['value']:.1f}" for length in lengths)]
        for name, label in [*((name, name.replace("_", " ")) for name in names), ("mean", "**mean**")]
    ]
    plans = [id.split("/")[:2] for id in rows if id.endswith(f"/{lengths[0]}/drop")]
    drops = []
    for plan, budget in plans:
        found = [rows[f"{plan}/{budget}/{length}/drop"] for length in lengths]
        answered = min(row["detail"].get("samples", samples) for row in found)  # older results do not say
        drops.append([f"{plan}, {budget} %", *map(_interval, found), str(answered)])
    lines = [
        f"By `benchmarks.accuracy` on {results['device']}, {results['date'][:10]}: at least {samples} samples of each",
        "task and length, other samples and another text than in training. Percent of the expected strings that are in",
        "the answers under dense attention:",
        "",
        *_table(["task", *columns], tasks),
        "",
        "Points of the mean lost by sparse attention, with 95 % intervals, on the samples that the plan has answered:",
        "",
        *_table(["plan", *columns, "samples"], drops),
    ]
    return "\n".join(lines)


def others(results: dict[str, Any]) -> list[str]:
    """The rows that are not a plan's drop at one length: as they are, with their goals."""
    found = [
        row
        for row in results["rows"]
        if not row["id"].startswith(("dense/", "smollm2/", "ablation/", "margin/"))
        and not (row["id"].endswith("/drop") and "by_task" in row.get("detail", {}))
    ]
    lines = [
        [f"`{row['id']}`", f"{row['value']:.4g} {row['unit']}".strip(), row.get("goal", ""), VERDICTS[row.get("met")]]
        for row in found
    ]
    return _table(["row", "value", "goal", ""], lines) if lines else []


def margins(results: dict[str, Any]) -> list[str]:
    """How far MAGE is ahead of its nearest baseline, case by case."""
    rows = {row["id"].removeprefix("margin/"): row for row in results["rows"] if row["id"].startswith("margin/")}
    if not rows:
        return []
    lines = []
    for case, row in rows.items():
        baseline, budget, length = case.split("/")
        detail = row["detail"]
        few, many = min(detail["samples"].values()), max(detail["samples"].values())
        largest = max(detail["by_task"], key=lambda task: abs(detail["by_task"][task]))
        most = f"{largest.replace('_', ' ')}, {detail['by_task'][largest]:.1f}"
        value = f"{row['value']:.2f} ({detail['low']:.2f} to {detail['high']:.2f})"
        lines.append([f"{baseline}, {budget} %, {length.upper()}", value, f"{few} to {many}", most])
    head = ["MAGE less", "points of the mean", "samples of a task", "largest difference of a task"]
    return ["MAGE and its nearest baseline on the same samples, with 95 % intervals:", "", *_table(head, lines)]


def ar_limit(results: dict[str, Any]) -> list[str]:
    """SmolLM2's rows."""
    rows = [row for row in results["rows"] if row["id"].startswith("smollm2/")]
    if not rows:
        return []
    lengths = list(dict.fromkeys(row["id"].split("/")[1] for row in rows))
    plans = list(dict.fromkeys("/".join(row["id"].split("/")[2:]) for row in rows))
    by_id = {row["id"]: row for row in rows}
    samples = by_id[f"smollm2/{lengths[0]}/dense"]["detail"]["samples"]
    head = ["SmolLM2, single needle", *(f"{n.upper()} tokens" for n in lengths)]
    lines = [[f"`{plan}`", *(_interval(by_id[f"smollm2/{n}/{plan}"]) for n in lengths)] for plan in plans]
    return [*_table(head, lines), "", f"{samples} samples each, on {results['device']}."]


def ablation(results: dict[str, Any]) -> list[str]:
    """A line per changed option: points lost in the mean and by task; a table per budget and length, singles in one."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results["rows"]:
        if row["id"].startswith("ablation/"):
            _, budget, length, _ = row["id"].split("/", 3)
            groups.setdefault((budget, length), []).append(row)
    parts: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for (budget, length), rows in groups.items():
        where = f"{budget} % and {length.upper()} tokens"
        for row in rows:
            name = row["id"].split("/", 3)[3]
            if len(rows) == 1 < len(groups):
                parts.setdefault("At other budgets and lengths:", []).append((f"{name}, {where}", row))
            else:
                parts.setdefault(f"At {where}:", []).append((name, row))
    lines: list[str] = []
    for title, found in parts.items():
        tasks = list(found[0][1]["detail"]["by_task"])
        made = [
            [name, _interval(row), f"{row['detail']['steps_per_block']:.1f}", str(row["detail"]["samples"]),
             *(f"{row['detail']['by_task'][task]:.1f}" for task in tasks)]
            for name, row in found
        ]  # fmt: skip
        head = ["changed", "mean lost", "steps per block", "samples", *(task.replace("_", " ") for task in tasks)]
        lines += [*([""] if lines else []), title, "", *_table(head, made)]
    return lines


def tables(folder: Path = RESULTS) -> str:
    """Markdown of everything that was measured; a sentence where nothing was."""
    parts: list[str] = []
    for path in sorted(folder.glob("accuracy*.json"), key=lambda path: ("ablation" in path.name, path.name)):
        results = json.loads(path.read_text(encoding="utf-8"))
        if any(row["id"].startswith("dense/") for row in results["rows"]):
            parts.append(scores(results))
        for made in (ar_limit(results), ablation(results), margins(results), others(results)):
            if made:
                parts.append("\n".join(made))
    return "\n\n".join(parts) + "\n" if parts else "Not measured yet.\n"


def render(page: str, folder: Path = RESULTS) -> str:
    """The page's text with its tables brought up to date. Raises ValueError if the markers are missing."""
    return replace_between(page, BEGIN, END, tables(folder), page="page")


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrites docs/accuracy.md, or with --check compares it."""
    return update(
        argv, PAGE, render, name="docs/accuracy.md", module="benchmarks.accuracy_tables", description=__doc__ or ""
    )


if __name__ == "__main__":
    sys.exit(main())
