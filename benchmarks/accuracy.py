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
that would not end in time. The results file is written after every round, and with `--work` an interrupted run goes on
where it stopped. For a small model compiling is most of the time: caches have one size for all lengths, so that each
plan is one program, and the plans of a batch run side by side, in threads (`--workers`, from one prefill) and in
processes (`--processes`). With processes each plan rests on as many samples as it has answered in time, the baselines
that are far behind on one round; differences are always of the same samples. `--margins` then adds samples where they
decide most: MAGE and Quest alone, at 5 and 10 % (`accuracy_margins`). `--recall` measures what attending exactly beside
every step tells about the first step's set.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

import herald_jax
from benchmarks import accuracy_margins, accuracy_parts, common
from benchmarks.accuracy_rows import (
    CERTAIN,
    RECALLED,
    Table,
    ablation_rows,
    ablation_shares,
    ablations,
    accuracy_rows,
    finetuned_plans,
    finetuned_rows,
    mage,
    name_of,
    plans,
    recall_rows,
    replays,
    shares,
    threshold_rows,
)
from herald_jax import eval_report, eval_sets, evaluate
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
    parser.add_argument("--replays", type=int, default=2, help="of each task and length, at 5 %% (default 2)")
    parser.add_argument("--workers", type=int, help="plans that run side by side (default: 8 with a GPU, else 2)")
    parser.add_argument(
        "--processes", type=int, default=1, help="that share the plans; with --finetuned, the lengths (default 1)"
    )
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)  # which of the processes this one is
    parser.add_argument("--herald", action="store_true", help="HERALD's plan too")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--ablation", nargs="?", const="both", choices=["mage", "herald", "both"],
        help="only the ablation, of both plans or one",
    )  # fmt: skip
    what.add_argument("--finetuned", metavar="CHECKPOINT", help="only what this, MAGE fine-tuned, gains at 2 %%")
    what.add_argument("--ar-limit", action="store_true", help="only the needle at block length 1")
    what.add_argument("--recall", action="store_true", help="only the selection's recall; the other rows stay")
    what.add_argument("--margins", action="store_true", help="only MAGE's margin over Quest; the other rows stay")
    parser.add_argument("--budgets", default="0.05", help="of the ablation (default %(default)s)")
    parser.add_argument("--cases", help="of the ablation, by name and separated by semicolons (default: all)")
    parser.add_argument("--work", type=Path, help="where answers are kept, to go on later (default: nowhere)")
    common.output_option(parser)
    options = parser.parse_args()
    if options.processes > 1 and (options.ar_limit or options.recall):
        parser.error("--processes does not go with --ar-limit or --recall")
    if (options.processes > 1 or options.margins) and options.work is None:
        parser.error("--processes and --margins go with --work")
    if (options.processes > 1 or options.margins) and options.part is None:
        common.print_rows(run_parts(options))
        return
    if options.workers is None:
        options.workers = 8 if jax.default_backend() == "gpu" else 2
    lengths = [int(part) for part in options.lengths.split(",")]
    until = time.monotonic() + 60 * options.minutes if options.minutes is not None else None
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        if options.part is not None:
            return answer_part(options, lengths, work, until)
        if options.ablation:
            rows = run_ablation(options, lengths, work, until)
        elif options.finetuned:
            rows = run_finetuned(options, lengths, work, until)
        elif options.recall:
            rows = run_recall(options, lengths, work, until)
        elif options.ar_limit:
            rows = run_ar_limit(options, lengths, work, until)
        else:
            chosen = plans(herald=options.herald)

            def report(table: Table) -> list[dict[str, Any]]:
                return write(options, "accuracy", accuracy_rows(table, chosen, lengths))

            table, _ = run_rounds(
                options, options.checkpoint, chosen, lengths, work / "accuracy", until, report,
                replayed=replays(herald=options.herald),
            )  # fmt: skip
            report(table)
            few = argparse.Namespace(**vars(options) | {"samples": min(options.samples, options.batch_size)})
            certain, _ = run_rounds(
                few, options.checkpoint, CERTAIN, lengths, work / "threshold", None, policy=Threshold()
            )
            rows = write(options, "accuracy", accuracy_rows(table, chosen, lengths) + threshold_rows(certain, lengths))
    common.print_rows(rows)


def run_parts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The main table, the ablation, the tuned row or the margins, in processes; after `--minutes`, what there is.

    Raises SystemExit where that is too little for a row.
    """
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    lengths = [int(part) for part in options.lengths.split(",")]
    command = [sys.executable, "-m", "benchmarks.accuracy", *sys.argv[1:]]
    print("parts ended with", accuracy_parts.run(command, options.processes, until), flush=True)
    if options.margins:
        settings = settings_of(options, options.checkpoint)
        answers, _ = accuracy_parts.read(options.work / "margins", options.processes, settings)
        landed = accuracy_margins.landed(common.results_path("accuracy", options.out), lengths)
        rows = accuracy_margins.rows(answers, lengths, landed)
        if not rows:
            raise SystemExit("no case has answers of every task in time; the same command goes on")
        common.write_results("accuracy", rows, folder=options.out, by_id=True)
        return rows

    def gathered(
        name: str, chosen: Sequence[Plan], lengths: Sequence[int], checkpoint: str = options.checkpoint,
        most: int | None = None,
    ) -> tuple[Table, dict[str, int]]:  # fmt: skip
        table, samples = accuracy_parts.gather(
            options.work / name, options.processes, settings_of(options, checkpoint), chosen,
            names_of(lengths, tuple(TASKS)), most,
        )  # fmt: skip
        if not samples:
            raise SystemExit(f"no plan has answered every task of {name} in time; the same command goes on")
        print(f"{name}: samples of each task and length: {samples}", flush=True)
        return table, samples

    if options.ablation:
        found = ablation_cases(options)
        table, _ = gathered("ablation", [Dense(), *found.values()], lengths)
        return write(options, "accuracy-ablation", ablation_rows(table, found, lengths), by_id=True)
    if options.finetuned:
        pair = finetuned_plans()
        _, before = gathered("untuned", pair, lengths)
        _, after = gathered("tuned", pair, lengths, options.finetuned)
        most = min(*before.values(), *after.values())
        untuned = gathered("untuned", pair, lengths, options.checkpoint, most)[0]
        tuned = gathered("tuned", pair, lengths, options.finetuned, most)[0]
        return write(options, "accuracy", finetuned_rows(untuned, tuned, lengths))
    chosen = plans(herald=options.herald)
    (table, samples), (certain, _) = gathered("accuracy", chosen, lengths), gathered("threshold", CERTAIN, lengths)
    missing = [describe(plan) for plan in chosen if describe(plan) not in samples]
    if missing:
        raise SystemExit(f"not answered in time: {', '.join(missing)}; the same command goes on")
    rows = accuracy_rows(table, chosen, lengths) + threshold_rows(certain, lengths)
    return write(options, "accuracy", rows)


def answer_part(options: argparse.Namespace, lengths: list[int], work: Path, until: float | None) -> None:
    """This process's share of the plans, round after round until it is done or ended.

    In the main table the last part has the threshold policy's rows instead, and the replays. With `--margins` cases are
    shared out, with `--finetuned` the lengths, and the first model's rounds leave half of the time to the second's.
    """
    part, others = options.part, options.processes - (options.ablation is None)
    few = argparse.Namespace(**vars(options) | {"samples": min(options.samples, options.batch_size)})
    if options.finetuned:
        before, after = (accuracy_parts.folder(work / name, part) for name in ("untuned", "tuned"))
        answer_finetuned(options, lengths[part :: options.processes], before, after, until)
    elif options.ablation:
        chosen = ablation_shares([Dense(), *ablation_cases(options).values()], others)[part]
        where = accuracy_parts.folder(work / "ablation", part)
        run_rounds(options, options.checkpoint, chosen, lengths, where, None)
    elif options.margins:
        chosen, mine = accuracy_margins.share(lengths, part, options.processes)
        where = accuracy_parts.folder(work / "margins", part)
        run_rounds(options, options.checkpoint, chosen, mine, where, None, often=accuracy_margins.OFTEN)
    elif part < others:
        chosen, all_samples = shares(plans(herald=options.herald), others)[part]
        where = accuracy_parts.folder(work / "accuracy", part)
        run_rounds(options if all_samples else few, options.checkpoint, chosen, lengths, where, None)
    else:
        certain = accuracy_parts.folder(work / "threshold", part)
        run_rounds(few, options.checkpoint, CERTAIN, lengths, certain, None, policy=Threshold())
        few.samples = options.replays
        if few.samples:
            where = accuracy_parts.folder(work / "accuracy", part)
            again = replays(herald=options.herald)
            run_rounds(few, options.checkpoint, [Dense()], lengths, where, None, replayed=again)


def settings_of(options: argparse.Namespace, checkpoint: str) -> dict[str, Any]:
    """What a journal's answers depend on."""
    return {"checkpoint": checkpoint, "batch_size": options.batch_size}


def names_of(lengths: Sequence[int], tasks: Sequence[str]) -> dict[str, str]:
    """Every set, and the group it is averaged in."""
    return {f"{task}/{length}": str(length) for length in lengths for task in tasks}


def write(
    options: argparse.Namespace, name: str, rows: list[dict[str, Any]], *, by_id: bool = False
) -> list[dict[str, Any]]:
    common.write_results(name, rows, folder=options.out, by_id=by_id)
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
    often: Mapping[str, int] | None = None,
) -> tuple[Table, int]:
    """Answer rounds until `--samples` are done or time (`time.monotonic`) is over; at least one.

    `often` names tasks with several batches in each round, whose samples are as many times `--samples`. `report` gets
    the table after every round, so that what was answered before a kill is not lost. Returns the last table, and how
    many samples of each task and length it rests on.
    """
    model = herald_jax.load(checkpoint)
    tokens = eval_sets.token_counter(model)
    config = GenerateConfig(max_new_tokens=ANSWER_TOKENS, room=max(lengths), policy=policy)
    size = options.batch_size
    parts = [
        (begin, begin * times + i * size, length, task)
        for begin, length, task in itertools.product(range(0, options.samples, size), lengths, tasks)
        for times in [(often or {}).get(task, 1)]
        for i in range(times)
    ]

    def make(_: int, first: int, length: int, task: str) -> eval_sets.EvalSet:
        count = min(size, options.samples * (often or {}).get(task, 1) - first)
        return eval_sets.task_set(
            model, task, length, count, seed=0, haystack=None, chat=chat, first=first, tokens=tokens
        )

    journal = evaluate.Journal(work, settings_of(options, checkpoint))
    names = names_of(lengths, tasks)

    def table(samples: int) -> Table:
        answers = [a for a in journal.answers if a["index"] < samples]
        return Table(eval_report.summarise(chosen, names, answers, journal.batches), answers)

    done = 0
    begun = time.monotonic()
    first_sets: list[eval_sets.EvalSet] = []
    try:
        with ThreadPoolExecutor(1) as ahead:  # makes the next part's prompts while this one is answered
            waiting = ahead.submit(make, *parts[0])
            known = len(journal.done)
            for number, (begin, first, _, _) in enumerate(parts):
                each = waiting.result()
                if number + 1 < len(parts):
                    waiting = ahead.submit(make, *parts[number + 1])
                evaluate.answer(model, chosen, [each], config, journal, batch_size=size, workers=options.workers)
                if first == 0:
                    first_sets.append(each)
                if number + 1 < len(parts) and parts[number + 1][0] == begin:
                    continue
                done, took = min(begin + size, options.samples), time.monotonic() - begun
                report(table(done))
                begun = time.monotonic()
                print(f"{done} samples of each task and length; the last round took {took:.0f} s", flush=True)
                if until is not None and len(journal.done) > known and time.monotonic() + took > until:
                    break
                known = len(journal.done)
            waiting.cancel()
        if replayed and options.replays:
            evaluate.replay_samples(model, replayed, first_sets, config, journal, options.replays)
    finally:
        journal.close()
    return table(done), done


def ablation_cases(options: argparse.Namespace) -> dict[str, Plan]:
    return ablations(
        options.ablation,
        budgets=[float(part) for part in options.budgets.split(",")],
        only=None if options.cases is None else options.cases.split(";"),
    )


def run_ablation(
    options: argparse.Namespace, lengths: Sequence[int], work: Path, until: float | None
) -> list[dict[str, Any]]:
    """One row per changed option: the drop in points of the task mean. Rows of other cases stay in the file."""
    found = ablation_cases(options)
    chosen: list[Plan] = [Dense(), *(dataclasses.replace(plan) for plan in found.values())]

    def report(table: Table) -> list[dict[str, Any]]:
        return write(options, "accuracy-ablation", ablation_rows(table, found, lengths), by_id=True)

    table, _ = run_rounds(options, options.checkpoint, chosen, lengths, work / "ablation", until, report)
    return report(table)


def run_finetuned(
    options: argparse.Namespace, lengths: list[int], work: Path, until: float | None
) -> list[dict[str, Any]]:
    """How much of the gap between MAGE at 2 % and dense, both before, the tuned model closes at 2 %."""
    before, after = answer_finetuned(options, lengths, work / "untuned", work / "tuned", until)
    return write(options, "accuracy", finetuned_rows(before, after, lengths))


def answer_finetuned(
    options: argparse.Namespace, lengths: list[int], before: Path, after: Path, until: float | None
) -> tuple[Table, Table]:
    """Both models' answers, in one process: what was compiled for the first serves the second.

    The second may still be in the making: it is waited for.
    """
    # Half of the time for each model; the second compiles nothing, and answers as many samples.
    half = None if until is None else (time.monotonic() + until) / 2
    untuned, samples = run_rounds(options, options.checkpoint, finetuned_plans(), lengths, before, half)
    while not Path(options.finetuned).exists() and (until is None or time.monotonic() < until):
        time.sleep(0.5)
    options = argparse.Namespace(**vars(options) | {"samples": samples})
    return untuned, run_rounds(options, options.finetuned, finetuned_plans(), lengths, after, None)[0]


def run_recall(
    options: argparse.Namespace, lengths: list[int], work: Path, until: float | None
) -> list[dict[str, Any]]:
    """Recall of the first step's set, at 5 % with the default pages and for the paper's numbers of single entries."""

    def report(table: Table) -> list[dict[str, Any]]:
        rows = recall_rows(table, lengths)
        common.write_results("accuracy", rows, folder=options.out, by_id=True)
        return rows

    chosen = list(RECALLED.values())
    table, _ = run_rounds(options, options.checkpoint, chosen, lengths, work / "recall", until, report)
    return report(table)


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
