"""The accuracy that each plan keeps on a model that really retrieves: `python -m benchmarks.accuracy CHECKPOINT`.

Runs `herald_jax.evaluate` on the synthetic tasks and turns its table into rows. Budgets are exact: `min_budget` is off.
Drops are in points of the task mean, against the dense plan on the same samples. `--ablation` measures instead what
decides the defaults, one option at a time at 5 %; `--finetuned` what MAGE fine-tuning gains at 2 %; `--ar-limit`, for
SmolLM2 as `make demo` converts it, the single needle at block length 1, where every second token
is exact and selects for the next.

Each step reveals one token. A model as sure of its answers as this one writes most blocks in a single step under the
threshold policy, and MAGE's first step is exact: its later steps, which are what a plan is about, would hardly be seen.
What MAGE does under the threshold has rows of its own (`mage/5/steps_ratio`, `threshold_drop`).

Samples are answered in rounds: one batch of every task and length under every plan. With `--minutes` no round begins
that would not end in time; the table always rests on the same samples for all plans. The results file is written after
every round, and with `--work` an interrupted run goes on where it stopped. For a small model
compiling is most of the time: caches have one size for all lengths, so that each plan is one program, and the plans of
a batch run side by side, in threads (`--workers`, from one prefill) and in processes (`--processes`).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

import herald_jax
from benchmarks import accuracy_parts, common
from benchmarks.accuracy_rows import (
    GOALS,
    Table,
    ablation_rows,
    ablations,
    accuracy_rows,
    mage,
    name_of,
    plans,
    threshold_rows,
)
from herald_jax import eval_report, evaluate
from herald_jax.config import GenerateConfig
from herald_jax.denoise import StaticLowConfidence, Threshold
from herald_jax.eval_report import describe
from herald_jax.plans import Dense, Plan
from herald_jax.tasks import ANSWER_TOKENS, TASKS

# One token a step, the most certain one.
ONE_BY_ONE = StaticLowConfidence()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="a converted checkpoint: the reference model")
    parser.add_argument("--lengths", default="4096,8192")
    parser.add_argument("--samples", type=int, default=256, help="of each task and length, at most (default 256)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a round (default 64)")
    parser.add_argument("--minutes", type=float, help="begin no round that would not end in time (default: do all)")
    parser.add_argument("--replays", type=int, default=2, help="of each task and length, MAGE at 5 %% (default 2)")
    parser.add_argument("--workers", type=int, help="plans that run side by side (default: 8 with a GPU, else 2)")
    parser.add_argument(
        "--processes", type=int, default=1, help="that share the plans; also for --ablation (default 1)"
    )
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)  # which of the processes this one is
    parser.add_argument("--herald", action="store_true", help="HERALD's plan too")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--ablation", action="store_true", help="only the ablation, at the first length")
    what.add_argument("--finetuned", metavar="CHECKPOINT", help="only what this, MAGE fine-tuned, gains at 2 %%")
    what.add_argument("--ar-limit", action="store_true", help="only the needle at block length 1")
    parser.add_argument("--work", type=Path, help="where answers are kept, to go on later (default: nowhere)")
    common.output_option(parser)
    options = parser.parse_args()
    if options.processes > 1 and (options.finetuned or options.ar_limit or options.work is None):
        parser.error("--processes goes with --work, and with --ablation or nothing else")
    if options.processes > 1 and options.part is None:
        common.print_rows(run_parts(options))
        return
    if options.workers is None:
        options.workers = 8 if jax.default_backend() == "gpu" else 2
    lengths = [int(part) for part in options.lengths.split(",")]
    until = time.monotonic() + 60 * options.minutes if options.minutes is not None else None
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        if options.part is not None:
            return answer_part(options, lengths, work)
        if options.ablation:
            rows = run_ablation(options, lengths[0], work, until)
        elif options.finetuned:
            rows = run_finetuned(options, lengths, work, until)
        elif options.ar_limit:
            rows = run_ar_limit(options, lengths, work, until)
        else:
            chosen = plans(herald=options.herald)

            def report(table: Table) -> list[dict[str, Any]]:
                return write(options, "accuracy", accuracy_rows(table, chosen, lengths))

            table, _ = run_rounds(
                options, options.checkpoint, chosen, lengths, work / "accuracy", until, report, replayed=[mage(0.05)]
            )
            report(table)
            few = argparse.Namespace(**vars(options) | {"samples": min(options.samples, options.batch_size)})
            certain, _ = run_rounds(
                few, options.checkpoint, [Dense(), mage(0.05)], lengths, work / "threshold", None, policy=Threshold()
            )
            rows = write(options, "accuracy", accuracy_rows(table, chosen, lengths) + threshold_rows(certain, lengths))
    common.print_rows(rows)


def run_parts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The main table or the ablation, answered in several processes; after `--minutes` by what there is."""
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    lengths = [int(part) for part in options.lengths.split(",")]
    command = [sys.executable, "-m", "benchmarks.accuracy", *sys.argv[1:]]
    print("parts ended with", accuracy_parts.run(command, options.processes, until), flush=True)
    settings = settings_of(options, options.checkpoint)

    def gathered(name: str, chosen: Sequence[Plan], lengths: Sequence[int]) -> Table:
        table, samples = accuracy_parts.gather(
            options.work / name, options.processes, settings, chosen, names_of(lengths, tuple(TASKS))
        )
        if not samples:
            raise SystemExit(f"no plan has answered every task of {name} in time; the same command goes on")
        print(f"{name}: {samples} samples of each task and length", flush=True)
        return table

    if options.ablation:
        found = ablations(herald=options.herald)
        return write(
            options,
            "accuracy-ablation",
            ablation_rows(gathered("ablation", [Dense(), *found.values()], lengths[:1]), found, lengths[0]),
        )
    chosen = plans(herald=options.herald)
    table, certain = gathered("accuracy", chosen, lengths), gathered("threshold", [Dense(), mage(0.05)], lengths)
    missing = [describe(plan) for plan in chosen if all(plan_ != describe(plan) for plan_, _ in table.means)]
    if missing:
        raise SystemExit(f"not answered in time: {', '.join(missing)}; the same command goes on")
    rows = accuracy_rows(table, chosen, lengths) + threshold_rows(certain, lengths)
    return write(options, "accuracy", rows)


def answer_part(options: argparse.Namespace, lengths: list[int], work: Path) -> None:
    """This process's share of the plans, round after round until it is done or ended.

    In the main table the last part has the threshold policy's rows instead, and the replays.
    """
    part, others = options.part, options.processes - (not options.ablation)
    if options.ablation:
        chosen = [Dense(), *ablations(herald=options.herald).values()]
        where, lengths = work / "ablation", lengths[:1]
    else:
        chosen, where = plans(herald=options.herald), work / "accuracy"
    where = accuracy_parts.folder(where, part)
    if part < others:
        run_rounds(options, options.checkpoint, chosen[part::others], lengths, where, None)
        return
    few = argparse.Namespace(**vars(options) | {"samples": min(options.samples, options.batch_size)})
    certain = accuracy_parts.folder(work / "threshold", part)
    run_rounds(few, options.checkpoint, [Dense(), mage(0.05)], lengths, certain, None, policy=Threshold())
    few.samples = options.replays
    if few.samples:
        run_rounds(few, options.checkpoint, [Dense()], lengths, where, None, replayed=[mage(0.05)])


def settings_of(options: argparse.Namespace, checkpoint: str) -> dict[str, Any]:
    """What a journal's answers depend on."""
    return {"checkpoint": checkpoint, "batch_size": options.batch_size}


def names_of(lengths: Sequence[int], tasks: Sequence[str]) -> dict[str, str]:
    """Every set, and the group it is averaged in."""
    return {f"{task}/{length}": str(length) for length in lengths for task in tasks}


def write(options: argparse.Namespace, name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    common.write_results(name, rows, folder=options.out)
    return rows


def run_rounds(
    options: argparse.Namespace,
    checkpoint: str,
    chosen: Sequence[Plan],
    lengths: Sequence[int],
    work: Path,
    until: float | None,
    report: Callable[[Table], Any] = lambda table: None,
    *,
    replayed: Sequence[Plan] = (),
    tasks: Sequence[str] = tuple(TASKS),
    chat: bool = False,
    policy: Any = ONE_BY_ONE,
) -> tuple[Table, int]:
    """Answer rounds until `--samples` are done or time (`time.monotonic`) is over; at least one.

    `report` gets the table after every round, so that what was answered before a kill is not lost. Returns the last
    table, and how many samples of each task and length it rests on.
    """
    model = herald_jax.load(checkpoint)
    tokens = evaluate.token_counter(model)
    config = GenerateConfig(max_new_tokens=ANSWER_TOKENS, room=max(lengths), policy=policy)
    size = options.batch_size
    parts = [(first, length) for first in range(0, options.samples, size) for length in lengths]

    def make(part: tuple[int, int]) -> list[evaluate.EvalSet]:
        first, length = part
        count = min(size, options.samples - first)
        return [
            evaluate.task_set(model, task, length, count, seed=0, haystack=None, chat=chat, first=first, tokens=tokens)
            for task in tasks
        ]

    journal = evaluate.Journal(work, settings_of(options, checkpoint))
    names = names_of(lengths, tasks)

    def table(samples: int) -> Table:
        answers = [a for a in journal.answers if a["index"] < samples]
        return Table(eval_report.summarise(chosen, names, answers, journal.batches))

    done = 0
    begun = time.monotonic()
    first_sets: list[evaluate.EvalSet] = []
    try:
        with ThreadPoolExecutor(1) as ahead:  # makes the next part's prompts while this one is answered
            waiting = ahead.submit(make, parts[0])
            for number, (first, length) in enumerate(parts):
                sets = waiting.result()
                if number + 1 < len(parts):
                    waiting = ahead.submit(make, parts[number + 1])
                known = len(journal.done)
                evaluate.answer(model, chosen, sets, config, journal, batch_size=size, workers=options.workers)
                if first == 0:
                    first_sets += sets
                if length != lengths[-1]:
                    continue
                done, took = min(first + size, options.samples), time.monotonic() - begun
                report(table(done))
                begun = time.monotonic()
                print(f"{done} samples of each task and length; the last round took {took:.0f} s", flush=True)
                if until is not None and len(journal.done) > known and time.monotonic() + took > until:
                    break
            waiting.cancel()
        if replayed and options.replays:
            evaluate.replay_samples(model, replayed, first_sets, config, journal, options.replays)
    finally:
        journal.close()
    return table(done), done


def run_ablation(options: argparse.Namespace, length: int, work: Path, until: float | None) -> list[dict[str, Any]]:
    """One row per changed option: the drop in points of the task mean."""
    found = ablations(herald=options.herald)
    chosen: list[Plan] = [Dense(), *(dataclasses.replace(plan) for plan in found.values())]

    def report(table: Table) -> list[dict[str, Any]]:
        return write(options, "accuracy-ablation", ablation_rows(table, found, length))

    table, _ = run_rounds(options, options.checkpoint, chosen, [length], work / "ablation", until, report)
    return report(table)


def run_finetuned(
    options: argparse.Namespace, lengths: list[int], work: Path, until: float | None
) -> list[dict[str, Any]]:
    """How much of the gap between MAGE at 2 % and dense, both before, the tuned model closes at 2 %.

    Entries are chosen one by one, as in the paper: the pages that are the default leave this model no gap to close.
    Where there is none, no row is made.
    """
    sparse = mage(0.02, page_size=1)
    pair: list[Plan] = [Dense(), sparse]
    # Half of the time for each model; the second compiles nothing, and answers as many samples.
    half = None if until is None else (time.monotonic() + until) / 2
    before, samples = run_rounds(options, options.checkpoint, pair, lengths, work / "untuned", half)
    options = argparse.Namespace(**vars(options) | {"samples": samples})
    after, _ = run_rounds(options, options.finetuned, pair, lengths, work / "tuned", None)

    def mean(table: Table, plan: Plan) -> float:
        return sum(table.mean(plan, length) for length in lengths) / len(lengths)

    dense = mean(before, Dense())
    gap, left = dense - mean(before, sparse), dense - mean(after, sparse)
    detail: dict[str, Any] = {"gap_before": gap, "gap_after": left, "dense_after": mean(after, Dense())}
    detail |= {"samples": samples}
    for length in lengths:
        for name, table in (("before", before), ("after", after)):
            detail[f"{name}/{name_of(length)}"] = {
                "dense": table.mean(Dense(), length),
                "mage": table.mean(sparse, length),
                "by_task": {task: 100 * table.score(sparse, f"{task}/{length}")["score"] for task in TASKS},
            }
    if gap <= 0:
        print(f"MAGE at 2 % loses nothing before fine-tuning ({-gap:.2f} points above dense): no share of a gap")
        return []
    rows = [common.row("finetune/2/gap_closed", 1 - left / gap, "", goal=GOALS["finetune/2/gap_closed"], detail=detail)]
    return write(options, "accuracy", rows)


def run_ar_limit(
    options: argparse.Namespace, lengths: list[int], work: Path, until: float | None
) -> list[dict[str, Any]]:
    """A causal model with its chat template: MAGE at 10 %, exact at every second token, beside dense.

    To compare: exact at every fourth, and a recent window that is exact at every second.
    """
    task = "single_needle"
    sparse = {
        "mage/10": mage(0.1, select_every=2),
        "mage_every_4/10": mage(0.1, select_every=4),
        "recent/10": mage(0.1, select_every=2, selector="recent"),
    }
    chosen: list[Plan] = [Dense(), *sparse.values()]
    table, samples = run_rounds(
        options, options.checkpoint, chosen, lengths, work / "ar", until, tasks=[task], chat=True
    )
    rows = []
    for length in lengths:
        where, dense = f"smollm2/{name_of(length)}", table.score(Dense(), f"{task}/{length}")
        detail = {"low": 100 * dense["low"], "high": 100 * dense["high"], "samples": samples}
        rows.append(common.row(f"{where}/dense", 100 * dense["score"], "%", detail=detail))
        for name, plan in sparse.items():
            found = table.score(plan, f"{task}/{length}")
            detail = {"low": 100 * found["low"], "high": 100 * found["high"], "drop": 100 * found["drop"]}
            # Within dense's interval: the goal is that interval's lower end.
            goal = f">={100 * dense['low']:.4g}" if name == "mage/10" else None
            rows.append(common.row(f"{where}/{name}", 100 * found["score"], "%", goal=goal, detail=detail))
    return write(options, "accuracy", rows)


if __name__ == "__main__":
    main()
