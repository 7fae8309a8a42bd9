"""`python -m benchmarks.herald_plot`: HERALD's speed-up against context length, from the results file (matplotlib).

Left a block's latency of one row, right the throughput under the cap on device memory, both against the dense plan and
with each selector, as `benchmarks.herald` measured them. Writes docs/img/herald_speedup.png.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

PLOT = Path(__file__).parent.parent / "docs" / "img" / "herald_speedup.png"
SELECTORS = {"cpu": ("scan on the CPU", "tab:blue"), "index": ("index on the device", "tab:orange")}
Series = dict[str, dict[int, float]]


def points(rows: Sequence[dict[str, Any]], shape: str, budget: str) -> tuple[Series, Series]:
    """Speed-ups of one row's latency and of the throughput at 32 steps a block: selector -> context in K -> times.

    Raises SystemExit where there is no row of them.
    """
    found: tuple[Series, Series] = ({}, {})
    forms = (
        rf"latency_case/{shape}/(\d+)k/b1/{budget}/(\w+)",
        rf"throughput_case/{shape}/(\d+)k/steps32/{budget}/(\w+)",
    )
    for row in rows:
        for series, form in zip(found, forms, strict=True):
            match = re.fullmatch(form, row["id"])
            if match:
                series.setdefault(match[2], {})[int(match[1])] = row["value"]
    if not any(found):
        raise SystemExit(f"error: no rows of {shape} at budget {budget}; run python -m benchmarks.herald first")
    return found


def draw(rows: Sequence[dict[str, Any]], path: Path, shape: str = "sdar8b", budget: str = "0.05") -> None:
    """Both plots side by side, in one file."""
    latency, throughput = points(rows, shape, budget)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = {"latency of a block, one row": latency, "throughput under one cap on device memory": throughput}
    parts = {title: series for title, series in parts.items() if series}  # one may not have been measured
    figure, axes = pyplot.subplots(1, len(parts), figsize=(4.5 * len(parts), 4), layout="constrained", squeeze=False)
    for axis, (title, series) in zip(axes[0], parts.items(), strict=True):
        axis.axhline(1, color="0.7", linestyle="--", label="dense plan")
        for selector, values in series.items():
            label, color = SELECTORS[selector]
            contexts = sorted(values)
            axis.plot(contexts, [values[x] for x in contexts], "o-", color=color, label=label)
        ticks = sorted({x for values in series.values() for x in values})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{x}K" for x in ticks])
        axis.set_xticks([], minor=True)
        axis.set(xlabel="context (tokens)", ylabel="times as fast as the dense plan", title=title, ylim=(0, None))
        axis.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="sdar8b")
    parser.add_argument("--budget", default="0.05")
    parser.add_argument("--results", type=Path, default=RESULTS / "herald-h200.json", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=PLOT, help="default: %(default)s")
    options = parser.parse_args()
    rows = json.loads(options.results.read_text(encoding="utf-8"))["rows"]
    draw(rows, options.out, options.shape, options.budget)


if __name__ == "__main__":
    main()
