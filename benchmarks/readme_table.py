"""`python -m benchmarks.readme_table`: the README's table of results, made from results/*.json and never typed.

Shown are all rows with a goal, met or missed, and all rows of benchmarks without any; of rows that two benchmarks
measure on one device, the newer. With `--check` nothing is written and the status is 1 if the README is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.generated import replace_between, update

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- results: begin (made by `python -m benchmarks.readme_table`) -->", "<!-- results: end -->"
VERDICTS = {True: "met", False: "**missed**", None: ""}


def table(folder: Path = RESULTS) -> str:
    """Markdown of every result in `folder`; a sentence where there is none."""
    reports = {file: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}
    if not reports:
        return "No results yet.\n"
    newest: dict[tuple[str, str], str] = {}
    for report in reports.values():
        for row in report["rows"]:
            newest[_key(report, row)] = max(_date(report, row), newest.get(_key(report, row), ""))
    lines = ["| measured | value | goal | | device | commit |", "|---|---:|---|---|---|---|"]
    hidden: list[str] = []
    for file, report in reports.items():
        rows = [row for row in report["rows"] if _date(report, row) == newest[_key(report, row)]]
        goals = any("goal" in row for row in report["rows"])
        shown = [row for row in rows if "goal" in row or not goals]
        lines += [_line(report, row) for row in shown]
        if len(shown) < len(rows):
            hidden.append(f"{len(rows) - len(shown)} in [{file.name}](benchmarks/results/{file.name})")
    text = "\n".join(lines) + "\n"
    return text + (f"\nRows without a goal: {', '.join(hidden)}.\n" if hidden else "")


def _key(report: dict[str, Any], row: dict[str, Any]) -> tuple[str, str]:
    return report["device"], row["id"]


def _date(report: dict[str, Any], row: dict[str, Any]) -> str:
    return row.get("date", report["date"])


def _line(report: dict[str, Any], row: dict[str, Any]) -> str:
    commit = str(row.get("commit", report["commit"]))[:8]
    goal = row.get("goal", "")
    cells = [
        f"`{row['id']}`",
        f"{row['value']:g} {row['unit']}".strip(),
        f"{goal} {row['unit']}".strip() if goal else "",
    ]
    return "| " + " | ".join([*cells, VERDICTS[row.get("met")], report["device"], commit]) + " |"


def render(readme: str, folder: Path = RESULTS) -> str:
    """The README's text with its table brought up to date. Raises ValueError if the markers are missing."""
    return replace_between(readme, BEGIN, END, table(folder), page="README")


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrites README.md, or with --check compares it."""
    return update(argv, README, render, name="README.md", module="benchmarks.readme_table", description=__doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
