"""What every benchmark shares: the machine's description, the results files, and `stopwatch`'s and `sizes`' names."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.lowering import Workshop
from benchmarks.sizes import L2_BYTES, input_sets
from benchmarks.stopwatch import Stopwatch, Time, wall_time

__all__ = [
    "L2_BYTES",
    "Time",
    "commit",
    "copy_bandwidth",
    "device_name",
    "device_slug",
    "device_time",
    "input_sets",
    "merge_option",
    "merge_results",
    "output_option",
    "print_rows",
    "rms_error",
    "row",
    "stage",
    "versions",
    "wall_time",
    "write_results",
]

RESULTS = Path(__file__).parent / "results"
_BEGAN = time.perf_counter()


def stage(text: str) -> None:
    """Says on standard error what is done, and when: seconds since the benchmark began."""
    print(f"[{time.perf_counter() - _BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)


def device_time(fn: Callable[..., Any], inputs: Sequence[tuple], *, repeats: int = 20, warmup: int = 2) -> Time:
    """`Stopwatch.time` in a session of its own, which costs most of a second: share one where there are several."""
    with Stopwatch() as watch:
        taken = watch.time(fn, inputs, repeats=repeats, warmup=warmup)
    return taken.time


def copy_bandwidth(nbytes: int = 2**31) -> float:
    """Bytes per second of a large device-to-device copy, counting bytes read plus bytes written."""
    x = jax.random.bits(jax.random.key(0), (nbytes // 4,), jnp.uint32)
    taken = device_time(jax.jit(jnp.copy), [(x,)], repeats=10)
    return 2 * nbytes / taken.seconds


def rms_error(value: Any, reference: Any) -> float:
    """RMS(value - reference) / RMS(reference), inf if anything is NaN."""
    value, reference = jnp.asarray(value, jnp.float32), jnp.asarray(reference, jnp.float32)
    error = float(jnp.sqrt(jnp.mean((value - reference) ** 2)) / jnp.sqrt(jnp.mean(reference**2)))
    return error if error == error else float("inf")


def row(id: str, value: float, unit: str, *, goal: str | None = None, detail: dict | None = None) -> dict[str, Any]:
    """One row of a results file. `goal` is like ">=1.4" or "<=1.05"; `met` follows from it."""
    result: dict[str, Any] = {"id": id, "value": _round(value), "unit": unit}
    if goal is not None:
        match = re.fullmatch(r"(>=|<=|==)\s*([-+0-9.e]+)", goal)
        if not match:
            raise ValueError(f"goal must be like '>=1.4', not {goal!r}")
        limit = float(match[2])
        met = {">=": value >= limit, "<=": value <= limit, "==": value == limit}[match[1]]
        result |= {"goal": goal, "met": bool(met)}
    if detail:
        result["detail"] = _round(detail)
    return result


def _round(x: Any) -> Any:
    """Floats to four significant digits, everywhere in a structure."""
    if isinstance(x, dict):
        return {key: _round(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_round(value) for value in x]
    return float(f"{x:.4g}") if isinstance(x, float) else x


def device_name() -> str:
    """What the results file calls this machine, e.g. "NVIDIA H200" or "cpu"."""
    return jax.devices()[0].device_kind


def device_slug() -> str:
    """The device's part of a results file's name: "h200" for "NVIDIA H200"."""
    return _slug(device_name())


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-")


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what ran: Python, JAX, and where there is a GPU its driver and CUDA."""
    found = {"python": sys.version.split()[0], "jax": jax.__version__}
    if jax.default_backend() == "gpu":
        found["cuda"] = jax.devices()[0].client.platform_version.replace("\n", " ")
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return found


def commit() -> str:
    """The commit of the running code: $HERALD_COMMIT where the tree travels without its history, else git's."""
    if "HERALD_COMMIT" in os.environ:
        return os.environ["HERALD_COMMIT"]
    command = ["git", "-C", str(RESULTS.parent), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def write_results(benchmark: str, rows: Iterable[dict], *, folder: Path | None = None, by_id: bool = False) -> Path:
    """Writes `<folder>/<benchmark>-<device>.json`, by default under `benchmarks/results`.

    Rows replace those of the same group (the id up to its first slash; with `by_id` only those of the same id) in an
    existing file. Other rows stay, and carry the commit and date that they came from.
    """
    report = {
        "benchmark": benchmark,
        "device": device_name(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": "python -m " + " ".join([_module_name(), *sys.argv[1:]]),
        "versions": versions(),
    }
    return _write(report, list(rows), folder, by_id)


def results_path(benchmark: str, folder: Path | None = None) -> Path:
    """Where `write_results` writes on this device."""
    return (RESULTS if folder is None else folder) / f"{benchmark}-{_slug(device_name())}.json"


def _write(report: dict[str, Any], rows: list[dict[str, Any]], folder: Path | None, by_id: bool = False) -> Path:
    folder = RESULTS if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report['benchmark']}-{_slug(report['device'])}.json"
    replaced = {r["id"] if by_id else r["id"].split("/")[0] for r in rows}
    kept = []
    if path.exists():
        old = json.loads(path.read_text())
        origin = {"commit": old["commit"], "date": old["date"]}
        kept = [{**r, **{k: r.get(k, v) for k, v in origin.items()}} for r in old["rows"]]
        kept = [r for r in kept if (r["id"] if by_id else r["id"].split("/")[0]) not in replaced]
    lines = json.dumps({**report, "rows": []}, indent=1)
    body = ",\n".join("  " + json.dumps(r) for r in kept + rows)
    path.write_text(lines.replace('"rows": []', f'"rows": [\n{body}\n ]') + "\n")
    return path


def merge_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--merge FILES`, for `merge_results`."""
    parser.add_argument(
        "--merge", type=Path, nargs="+", default=[], metavar="FILE",
        help="measure nothing: join the rows of these results files, parts of one run",
    )  # fmt: skip


def merge_results(
    benchmark: str,
    paths: Sequence[Path],
    finish: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list,
    *,
    folder: Path | None = None,
) -> list[dict[str, Any]]:
    """Writes what `write_results` does, with `finish(rows)` of all rows of `paths`; returns these rows. Needs no GPU.

    The command is all their commands, the rest of the head the first one's. Raises SystemExit where the files are not
    of one benchmark, device, commit and set of versions, or where two have a row of one id.
    """
    reports = [json.loads(path.read_text()) for path in paths]
    alike = {key: reports[0][key] for key in ("device", "commit", "versions")} | {"benchmark": benchmark}
    for path, report in zip(paths, reports, strict=True):
        for key, wanted in alike.items():
            if report[key] != wanted:
                raise SystemExit(f"error: {path} has {key} {report[key]!r}, not {wanted!r}: not a part of the same run")
    rows = finish([row for report in reports for row in report["rows"]])
    ids = [row["id"] for row in rows]
    if twice := sorted({id for id in ids if ids.count(id) > 1}):
        raise SystemExit(f"error: the files to merge have {', '.join(twice)} more than once; give each case to one run")
    command = " && ".join(report["command"] for report in reports)
    _write({**reports[0], "command": command}, rows, folder)
    return rows


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).stem


def print_rows(rows: Iterable[dict]) -> None:
    """The rows as a table, then all of them as one JSON line (the last line of every benchmark)."""
    rows = list(rows)
    width = max((len(r["id"]) for r in rows), default=0)
    for r in rows:
        verdict = "" if "goal" not in r else f"  goal {r['goal']}  {'met' if r['met'] else 'MISSED'}"
        print(f"{r['id']:<{width}}  {r['value']:>10.4g} {r['unit']}{verdict}")
    print(json.dumps({"rows": rows}))


def run_part(rows: Callable[[dict[str, Any]], list[dict]], description: str | None) -> None:
    """The command line of one part of `benchmarks.kernels`: `rows(context)`, printed and written."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, on any machine; writes no results")
    output_option(parser)
    options = parser.parse_args()
    context: dict[str, Any] = {"quick": options.quick}
    if not options.quick:
        context["save"] = lambda found: write_results("kernels", found, folder=options.out)
    with Workshop() as shop:
        found = rows(context | {"copy_bandwidth": copy_bandwidth(2**20 if options.quick else 2**31), "shop": shop})
    if not options.quick:
        write_results("kernels", found, folder=options.out)
    print_rows(found)


def output_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--out FOLDER`, where the results file goes."""
    parser.add_argument(
        "--out", type=Path, default=None, help="folder of the results file (default: benchmarks/results)"
    )
