"""`benchmarks.accuracy` in several processes: each answers under some of the plans, and one table is made of all.

With a model this small most of the time goes into tracing and lowering programs, which one Python process does for one
plan at a time whatever its threads. Every part keeps a journal of its own, so what it has answered survives its end.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy_rows import Table
from herald_jax import eval_report, evaluate
from herald_jax.eval_report import describe
from herald_jax.plans import Plan

_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # a process's share of the device's memory
_GRACE = 10  # seconds from the request to end to the end


def run(command: Sequence[str], processes: int, until: float | None) -> list[int]:
    """`command` with `--part` and each part's number, side by side, until all are done or time is over.

    They share out the memory that this process may use: 0.9 of the device unless the environment says otherwise.

    Returns the parts' exit statuses; a part that time ended has a negative one. `until` is of `time.monotonic`.
    """
    share = {_MEMORY: f"{float(os.environ.get(_MEMORY, 0.9)) / processes:.3f}"}
    parts = [subprocess.Popen([*command, "--part", str(part)], env=os.environ | share) for part in range(processes)]
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            for part in parts:
                part.wait(None if until is None else max(until - time.monotonic(), 0.0))
    finally:
        for part in parts:
            part.terminate()
        for part in parts:
            try:
                part.wait(_GRACE)
            except subprocess.TimeoutExpired:
                part.kill()
    return [part.wait() for part in parts]


def folder(work: Path, part: int) -> Path:
    """Where a part keeps its journal."""
    return work / f"part-{part}"


def read(work: Path, processes: int, settings: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What is in the parts' journals: answers and batches."""
    answers: list[dict[str, Any]] = []
    batches: list[dict[str, Any]] = []
    for part in range(processes):
        if folder(work, part).exists():
            journal = evaluate.Journal(folder(work, part), dict(settings))
            journal.close()
            answers += journal.answers
            batches += journal.batches
    return answers, batches


def gather(
    work: Path, processes: int, settings: Mapping[str, Any], plans: Sequence[Plan], names: Mapping[str, str],
    most: int | None = None,
) -> tuple[Table, dict[str, int]]:  # fmt: skip
    """The table of what all parts answered, and how many samples of each set every plan has in it (`most` at most).

    A plan that has not answered all of the sets `names` is left out, and so are the samples that it has answered in
    some of them only.
    """
    answers, batches = read(work, processes, settings)
    found: dict[str, dict[str, set[int]]] = {describe(plan): {name: set() for name in names} for plan in plans}
    for answer in answers:
        if "agreement" not in answer and answer["plan"] in found:
            found[answer["plan"]][answer["set"]].add(answer["index"])
    counts = {label: min(len(indices) for indices in by_set.values()) for label, by_set in found.items()}
    complete = {label: count if most is None else min(count, most) for label, count in counts.items() if count}
    kept = [a for a in answers if a["plan"] in complete and a["index"] < complete[a["plan"]]]
    chosen = [plan for plan in plans if describe(plan) in complete]
    return Table(eval_report.summarise(chosen, names, kept, batches), kept), complete
