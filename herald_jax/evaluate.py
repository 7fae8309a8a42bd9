"""`herald-eval`: how much of a model's accuracy a plan keeps, on synthetic tasks or on LongBench-format files.

Every answer is written to `OUTPUT/answers.jsonl` as it comes, so that an interrupted run goes on where it stopped;
`results.json`, `results.md` and, with a sweep of budgets, `curve.png` are made from it at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from herald_jax import cli_arguments, drawing, eval_report, metrics, replay, tasks
from herald_jax.config import GenerateConfig
from herald_jax.errors import GenerationError, HeraldError
from herald_jax.eval_sets import EvalSample, EvalSet, longbench_sets, task_set, token_counter
from herald_jax.generate import SharedPrefill, generate
from herald_jax.loading import Model, load
from herald_jax.plans import Dense, Plan
from herald_jax.request import check_request
from herald_jax.sharding import make_mesh

_COUNTS = ("denoise_steps", "blocks", "sparse_blocks", "recall_sum", "mass_sum", "measured", "new_tokens")
_PLAIN_TEMPLATE = "{context}\n\nQuestion: {input}\nAnswer:"


class Journal:
    """`answers.jsonl`: the settings, then a record for every answer and every batch's counts.

    Raises GenerationError when the file was written under other settings, or by something else.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]):
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "answers.jsonl"
        self.answers: list[dict[str, Any]] = []
        self.batches: list[dict[str, Any]] = []
        # A line cut short by an interruption is not an answer.
        whole = path.read_bytes() if path.is_file() else b""
        whole = whole[: whole.rfind(b"\n") + 1]
        try:
            # Not `splitlines`: an answer may hold what that takes for the end of one.
            given, *records = [json.loads(line) for line in whole.decode("utf-8").split("\n")[:-1]] or [settings]
            differing = cli_arguments.differing(settings, given)
            for record in records:
                _ = record["plan"], record["set"], "index" in record or record["samples"]
                (self.answers if "index" in record else self.batches).append(record)
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise GenerationError(f"{path} is damaged ({error!r}); remove it, or give another --output") from error
        if differing:
            raise GenerationError(
                f"{path} was written with another {', '.join(differing)}; give another --output, or remove it"
            )
        # Never less than it held: a process may die at any time.
        self._file = path.open("ab")
        self._file.truncate(len(whole))
        if not whole:
            self.add(settings)
        self.done = {(r["plan"], r["set"], r["index"]) for r in self.answers if "agreement" not in r}
        self.replayed = {(r["plan"], r["set"], r["index"]) for r in self.answers if "agreement" in r}

    def add(self, *records: dict[str, Any]) -> None:
        """Append records, all or (if the process dies) none."""
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        self._file.write(text.encode("utf-8"))
        self._file.flush()

    def answered(self, plan: str, name: str, records: Sequence[dict[str, Any]], counts: dict[str, Any]) -> None:
        """Take in a batch: its answers and its counts."""
        both = {"plan": plan, "set": name}
        answers = [{**both, **record} for record in records]
        batch = {**both, "samples": [record["index"] for record in records], **counts}
        self.add(*answers, batch)
        self.answers += answers
        self.batches.append(batch)
        self.done |= {(plan, name, record["index"]) for record in records}

    def close(self) -> None:
        self._file.close()


def run(
    model: Model,
    plans: Sequence[Plan],
    sets: Sequence[EvalSet],
    config: GenerateConfig,
    directory: Path,
    *,
    settings: dict[str, Any],
    batch_size: int = 8,
    replays: int = 0,
    workers: int = 1,
) -> dict[str, Any]:
    """Run what is missing, write the results, and return them (`eval_report.summarise`).

    Args:
      replays: of each set, so many samples are also replayed with the dense plan's tokens forced.
      workers: as in `answer`.

    Raises GenerationError for requests that cannot be served, before anything is written.
    """
    for plan in plans:
        for each in sets:
            check_request(model.config, config, plan, [sample.ids for sample in each.samples])
    if replays:
        replay.check_config(config)
    journal = Journal(directory, settings)
    try:
        answer(model, plans, sets, config, journal, batch_size=batch_size, workers=workers)
        if replays:
            replay_samples(model, plans, sets, config, journal, replays)
    finally:
        journal.close()
    summary = eval_report.summarise(plans, {s.name: s.group for s in sets}, journal.answers, journal.batches)
    eval_report.write(directory, summary, settings)
    return summary


def answer(
    model: Model,
    plans: Sequence[Plan],
    sets: Sequence[EvalSet],
    config: GenerateConfig,
    journal: Journal,
    *,
    batch_size: int,
    workers: int = 1,
) -> None:
    """Answer every sample under every plan, where the journal has no answer yet.

    With `workers` above 1, so many plans answer a batch side by side, from one prefill: what takes long with a small
    model is compiling. Each then holds a cache of its own.
    """
    total = len(plans) * sum(len(each.samples) for each in sets)
    labels = {eval_report.describe(plan): plan for plan in plans}

    def missing(label: str, name: str, batch: Sequence[EvalSample]) -> bool:
        # Whole batches of the same samples, so that shapes repeat.
        return not all((label, name, sample.index) in journal.done for sample in batch)

    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=total, unit="answer", file=sys.stderr))
        pool = stack.enter_context(ThreadPoolExecutor(workers)) if workers > 1 else None
        for each in sets:
            for start in range(0, len(each.samples), batch_size):
                batch = each.samples[start : start + batch_size]
                left = [label for label in labels if missing(label, each.name, batch)]
                bar.update(len(batch) * (len(labels) - len(left)))
                bar.set_postfix_str(each.name)
                if pool is None:
                    for label in left:
                        journal.answered(label, each.name, *_answer(model, labels[label], each, batch, config))
                        bar.update(len(batch))
                    continue
                shared = SharedPrefill()
                waiting = {
                    pool.submit(_answer, model, labels[label], each, batch, config, shared): label for label in left
                }
                for done in as_completed(waiting):
                    journal.answered(waiting[done], each.name, *done.result())
                    bar.update(len(batch))


def _answer(
    model: Model, plan: Plan, each: EvalSet, batch: list[EvalSample], config: GenerateConfig,
    shared: SharedPrefill | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:  # fmt: skip
    result = generate(model, [sample.ids for sample in batch], config, plan, shared=shared)
    assert result.texts is not None  # an evaluation has a tokenizer
    records = []
    for row, (sample, text, tokens) in enumerate(zip(batch, result.texts, result.tokens, strict=True)):
        value = metrics.score(sample.metric, text, sample.expected, classes=sample.classes, dataset=sample.dataset)
        records.append({"index": sample.index, "score": value, "answer": text, "tokens": len(tokens)})
        if row in result.errors:
            records[-1]["error"] = result.errors[row]
    return records, {name: getattr(result.stats, name) for name in _COUNTS}


def replay_samples(
    model: Model, plans: Sequence[Plan], sets: Sequence[EvalSet], config: GenerateConfig, journal: Journal, count: int
) -> None:
    """Replay the first `count` samples of each set with the dense plan's tokens forced, where that was not done yet."""
    work = [(each, sample) for each in sets for sample in each.samples[:count]]
    with tqdm(total=len(work), unit="replay", file=sys.stderr) as bar:
        for each, sample in work:
            sparse = [plan for plan in plans if not isinstance(plan, Dense)]
            left = [p for p in sparse if (eval_report.describe(p), each.name, sample.index) not in journal.replayed]
            if left:
                trajectory = replay.record(model, sample.ids, config)
                for plan in left:
                    found = {"plan": eval_report.describe(plan), "set": each.name, "index": sample.index}
                    found["agreement"] = replay.replay(model, trajectory, plan)
                    journal.add(found)
                    journal.answers.append(found)
            bar.update()


def _parser() -> argparse.ArgumentParser:
    parser = cli_arguments.CommandParser(prog="herald-eval", description="Measure the accuracy that a plan keeps.")
    parser.add_argument("checkpoint", help="directory written by herald-convert")
    parser.add_argument("--output", required=True, metavar="DIR", help="where results go; an unfinished run goes on")
    group = parser.add_argument_group("what is asked")
    group.add_argument("--tasks", metavar="T,T", help=f"all (the default), or some of {', '.join(tasks.TASKS)}")
    group.add_argument("--lengths", default="1024", metavar="N,N", help="tokens of a prompt (default %(default)s)")
    group.add_argument("--samples", type=int, metavar="N", help="of each set (default: 20 of a task, all of a file)")
    group.add_argument("--task-seed", type=int, default=0, metavar="N", help="other samples (default %(default)s)")
    group.add_argument("--haystack", metavar="F", help="text to hide the tasks in (default: the package's own)")
    group.add_argument("--data", action="append", metavar="F", help="instead: a LongBench-format .jsonl; repeatable")
    group.add_argument("--metric", choices=metrics.METRICS, help="of --data (default: LongBench's for its data set)")
    group.add_argument("--template", metavar="F", help="prompt of --data, naming {context} and {input}")
    group.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, help="apply the chat template (default: if any)"
    )
    cli_arguments.add_decoding(parser)
    cli_arguments.add_plan(parser)
    group = parser.add_argument_group("comparing")
    group.add_argument("--budgets", metavar="B,B", help="the plan at each of these budgets; also draws curve.png")
    group.add_argument(
        "--replay",
        type=int,
        default=0,
        metavar="N",
        help="samples of each set at which the plan's predictions are compared with dense attention's, step by step "
        "from the same tokens",
    )
    cli_arguments.add_running(parser)
    parser.set_defaults(max_new_tokens=tasks.ANSWER_TOKENS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status and never raises for what a user can cause."""
    args = _parser().parse_args(argv)
    try:
        failed = _run(args)
    except KeyboardInterrupt:
        return cli_arguments.interrupted("interrupted; the same command goes on where it stopped", argv)
    except (HeraldError, OSError) as error:
        return cli_arguments.fail(error)
    except jax.errors.JaxRuntimeError as error:
        return cli_arguments.out_of_memory(error, "lower --batch-size, or spread the model (--devices)")
    if failed:
        print(
            f"error: {failed} answers ended early because the model produced NaN; what was written of them is scored",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _numbers(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise GenerationError(f"{flag} is {text!r}, but numbers separated by commas were expected") from None


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What a run's answers depend on."""
    files = [*(args.data or ()), args.template, args.haystack]
    return cli_arguments.settings(args, {"output", "batch_size", "devices", "samples", "replay"}, files)


def _run(args: argparse.Namespace) -> int:
    """Returns how many answers the model failed on."""
    config, plan = cli_arguments.build_request(args)
    plans: list[Plan] = [plan] if isinstance(plan, Dense) else [Dense(), plan]
    if args.budgets is not None:
        if isinstance(plan, Dense):
            raise GenerationError("--budgets goes with a plan that has a budget; give --plan mage, for instance")
        try:
            budgets = [cli_arguments.count_or_fraction(part) for part in args.budgets.split(",")]
        except argparse.ArgumentTypeError as error:
            raise GenerationError(f"--budgets: {error}") from None
        drawing.pyplot(eval_report.CURVE)  # not after all the answers
        plans = [Dense(), *dict.fromkeys(dataclasses.replace(plan, budget=budget) for budget in budgets)]
    for name in ("batch_size", "devices"):
        if getattr(args, name) < 1:
            raise GenerationError(f"{cli_arguments.flag_of(name)} is {getattr(args, name)}, but must be at least 1")
    if args.samples is not None and args.samples < 1:
        raise GenerationError(f"--samples is {args.samples}, but must be at least 1")
    if args.replay < 0:
        raise GenerationError(f"--replay is {args.replay}, but must be a number of samples")
    directory = Path(args.output)
    if directory.exists() and not directory.is_dir():
        raise GenerationError(f"--output {args.output} is a file, but a directory was expected")
    if args.data and args.tasks:
        raise GenerationError("give --tasks or --data, not both; each has its own results")
    model = load(args.checkpoint, dtype=args.dtype, mesh=make_mesh(model=args.devices) if args.devices > 1 else None)
    chat = model.tokenizer.chat_template is not None if args.chat is None else args.chat
    sets: list[EvalSet] = []
    if args.data:
        template = tasks.read_text(args.template) if args.template else _PLAIN_TEMPLATE
        if "{context" not in template and "{input" not in template:
            raise GenerationError(f"--template {args.template} names neither {{context}} nor {{input}}")
        for path in args.data:
            sets += longbench_sets(
                Path(path), model, metric=args.metric, template=template, room=config.max_new_tokens,
                limit=args.samples, chat=chat,
            )  # fmt: skip
    else:
        names = list(tasks.TASKS) if args.tasks in (None, "all") else args.tasks.split(",")
        haystack = tasks.Haystack(tasks.read_text(args.haystack)) if args.haystack else None
        count, tokens = args.samples or 20, token_counter(model)
        for length in _numbers("--lengths", args.lengths):
            sets += [
                task_set(model, t, length, count, seed=args.task_seed, haystack=haystack, chat=chat, tokens=tokens)
                for t in names
            ]
    names = [each.name for each in sets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise GenerationError(
            f"there are two sets of samples named {', '.join(twice)}, but each has results of its own"
        )
    settings = _settings(args)
    summary = run(
        model,
        plans,
        sets,
        config,
        directory,
        settings=settings,
        batch_size=args.batch_size,
        replays=args.replay,
    )
    if args.budgets is not None:
        eval_report.curve(summary, directory / "curve.png")
    print(eval_report.markdown(summary, settings), end="")
    return sum(row["failed"] for row in summary["rows"])


if __name__ == "__main__":
    sys.exit(main())
