"""What an evaluation found: means with confidence intervals, drops against dense, as JSON, Markdown and a curve."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from herald_jax import drawing
from herald_jax.plans import Dense, Plan
from herald_jax.publish import whole_file

RESAMPLES = 2000


def describe(plan: Plan) -> str:
    """A plan by its name and what differs from the defaults: "mage budget=0.05"; reporting flags do not count."""
    given = [
        f"{field.name}={getattr(plan, field.name)}"
        for field in dataclasses.fields(plan)
        if field.name != "measure" and (field.name == "budget" or getattr(plan, field.name) != field.default)
    ]
    return " ".join([type(plan).__name__.lower(), *given])


def interval(scores: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean by the bootstrap (percentiles of resampled means)."""
    values = np.asarray(scores, np.float64)
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def mean_of_groups(groups: Sequence[Sequence[float]], *, seed: int = 0) -> tuple[float, float, float]:
    """Mean of the groups' means, and its 95 % interval: each group is resampled within itself."""
    rng = np.random.default_rng(seed)
    total = np.zeros(RESAMPLES)
    for group in groups:
        values = np.asarray(group, np.float64)
        total += values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.percentile(total / len(groups), [2.5, 97.5])
    return float(np.mean([np.mean(group) for group in groups])), float(low), float(high)


_COUNTS = ("denoise_steps", "blocks", "sparse_blocks", "recall_sum", "mass_sum", "measured", "new_tokens")


def _figures(counts: Mapping[str, float]) -> dict[str, float | None]:
    measured = counts["measured"]
    return {
        "steps_per_block": counts["denoise_steps"] / max(counts["blocks"], 1),
        "recall": counts["recall_sum"] / measured if measured else None,
        "mass_kept": counts["mass_sum"] / measured if measured else None,
        "sparse_share": counts["sparse_blocks"] / max(counts["blocks"], 1),
    }


def _latest(batches: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those whose samples were not all answered again: where a set has grown, its last, partly filled batch was."""
    kept: list[Mapping[str, Any]] = []
    later: dict[tuple[str, str], set[int]] = {}
    for record in reversed(batches):
        seen, samples = later.setdefault((record["plan"], record["set"]), set()), record["samples"]
        if not seen.issuperset(samples):
            kept.append(record)
        seen.update(samples)
    return kept[::-1]


def summarise(
    plans: Sequence[Plan],
    sets: Mapping[str, str],
    answers: Sequence[Mapping[str, Any]],
    batches: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Rows per plan and set, and means per plan and group of sets.

    Args:
      sets: each set's name and the group it is averaged in ("1024" for all tasks of that length).
      answers: records with "plan", "set", "index", "score"; one with "agreement" is a replay's, and one with "error"
        ended early.
      batches: records with "plan", "set", "samples" (indices) and the counts of `stats.Stats`, in the order they came.
    """
    labels = [describe(plan) for plan in plans]
    scores: dict[tuple[str, str], dict[int, float]] = {}
    agreement: dict[tuple[str, str], list[float]] = {}
    failed: dict[tuple[str, str], set[int]] = {}
    for record in answers:
        key = (record["plan"], record["set"])
        if "agreement" in record:
            agreement.setdefault(key, []).append(record["agreement"])
        else:
            scores.setdefault(key, {})[record["index"]] = record["score"]
            if "error" in record:
                failed.setdefault(key, set()).add(record["index"])
    counts: dict[tuple[str, str], dict[str, float]] = {}
    for record in _latest(batches):
        total = counts.setdefault((record["plan"], record["set"]), dict.fromkeys(_COUNTS, 0.0))
        for name in _COUNTS:
            total[name] += record[name]
    dense = next((label for plan, label in zip(plans, labels, strict=True) if isinstance(plan, Dense)), None)
    rows, means = [], []
    drops: dict[tuple[str, str], list[float]] = {}
    for plan, label in zip(plans, labels, strict=True):
        budget = getattr(plan, "budget", None)
        for name, group in sets.items():
            found = scores.get((label, name))
            if not found:
                continue
            values = [found[i] for i in sorted(found)]
            low, high = interval(values)
            row = {"plan": label, "budget": budget, "set": name, "group": group, "samples": len(values)}
            row["failed"] = len(failed.get((label, name), ()))
            row |= {"score": float(np.mean(values)), "low": low, "high": high}
            row |= _figures(counts.get((label, name), dict.fromkeys(_COUNTS, 0.0)))
            if dense is not None and label != dense and (reference := scores.get((dense, name))):
                common = sorted(found.keys() & reference.keys())
                differences = drops[label, name] = [reference[i] - found[i] for i in common]
                row["drop"] = float(np.mean(differences))
                row["drop_low"], row["drop_high"] = interval(differences)
            if (label, name) in agreement:
                values = agreement[label, name]
                row["replay_agreement"] = float(np.mean(values))
                row["replay_low"], row["replay_high"] = interval(values)
            rows.append(row)
        for group in dict.fromkeys(sets.values()):
            parts = [list(scores[label, n].values()) for n, g in sets.items() if g == group and scores.get((label, n))]
            if parts:
                value, low, high = mean_of_groups(parts)
                mean = {"plan": label, "budget": budget, "group": group, "sets": len(parts)}
                mean |= {"score": value, "low": low, "high": high}
                paired = [drops[label, n] for n, g in sets.items() if g == group and (label, n) in drops]
                if len(paired) == len(parts):
                    mean["drop"], mean["drop_low"], mean["drop_high"] = mean_of_groups(paired)
                means.append(mean)
    return {"rows": rows, "means": means}


def _percent(row: Mapping[str, Any], value: str, low: str, high: str) -> str:
    return f"{100 * row[value]:.1f} ({100 * row[low]:.1f} to {100 * row[high]:.1f})"


def markdown(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The tables, for people. Scores are in percent, with 95 % intervals."""
    lines = [f"# {settings['checkpoint']}", "", "Scores in percent, with 95 % bootstrap intervals.", ""]
    lines += ["| plan | group | sets | mean | drop against dense |", "|---|---|---:|---:|---:|"]
    for row in summary["means"]:
        drop = _percent(row, "drop", "drop_low", "drop_high") if "drop" in row else ""
        lines.append(
            f"| {row['plan']} | {row['group']} | {row['sets']} | {_percent(row, 'score', 'low', 'high')} | {drop} |"
        )
    header = (
        "plan",
        "set",
        "samples",
        "score",
        "drop",
        "steps per block",
        "recall",
        "mass kept",
        "sparse blocks",
        "replay",
    )
    lines += ["", "| " + " | ".join(header) + " |", "|---|---|" + "---:|" * (len(header) - 2)]
    for row in summary["rows"]:
        cells = [row["plan"], row["set"], str(row["samples"]), _percent(row, "score", "low", "high")]
        cells.append(_percent(row, "drop", "drop_low", "drop_high") if "drop" in row else "")
        cells.append(f"{row['steps_per_block']:.2f}")
        cells += [
            "" if row[name] is None else f"{100 * row[name]:.1f}" for name in ("recall", "mass_kept", "sparse_share")
        ]
        replayed = "replay_agreement" in row
        cells.append(_percent(row, "replay_agreement", "replay_low", "replay_high") if replayed else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


CURVE = "the curve of --budgets"


def curve(summary: Mapping[str, Any], path: str | Path) -> None:
    """Mean score against budget, a line per group, dense as a dashed level. Raises ConfigError without matplotlib."""
    pyplot = drawing.pyplot(CURVE)
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for number, group in enumerate(dict.fromkeys(row["group"] for row in summary["means"])):
        rows = [row for row in summary["means"] if row["group"] == group]
        color = f"C{number}"
        level = [row["score"] for row in rows if row["budget"] is None]
        if level:
            axes.axhline(100 * level[0], color=color, linestyle="--", linewidth=1)
        points = sorted(
            (row["budget"], row["score"], row["low"], row["high"]) for row in rows if row["budget"] is not None
        )
        if points:
            x, y, low, high = (np.asarray(v, float) for v in zip(*points, strict=True))
            axes.plot(x, 100 * y, marker="o", color=color, label=str(group))
            axes.fill_between(x, 100 * low, 100 * high, color=color, alpha=0.15, linewidth=0)
    axes.set(xlabel="budget (share of the prefix, or entries)", ylabel="score, %", ylim=(0, 102))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title="dashed: dense")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(directory: Path, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """`results.json` and `results.md`."""
    results = json.dumps({"settings": settings, **summary}, indent=1) + "\n"
    for name, text in (("results.json", results), ("results.md", markdown(summary, settings))):
        with whole_file(directory / name) as out:
            out.write(text)
