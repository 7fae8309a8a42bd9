"""What an evaluation asks: sets of samples, of the synthetic tasks or of LongBench-format files."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

from herald_jax import metrics, tasks
from herald_jax.errors import GenerationError
from herald_jax.loading import Model


@dataclasses.dataclass(frozen=True)
class EvalSample:
    """One prompt, ready to run. `expected` are references, scored by `metric`."""

    index: int
    ids: list[int]
    expected: tuple[str, ...]
    metric: str
    classes: tuple[str, ...] = ()
    dataset: str = ""


@dataclasses.dataclass(frozen=True)
class EvalSet:
    """Samples reported together, and the group that sets are averaged in."""

    name: str
    group: str
    samples: list[EvalSample]


def token_counter(model: Model) -> Callable[[str], int]:
    """Counts the tokens of a text. It remembers sentences, since a haystack's come again and again."""
    tokenizer = model.tokenizer

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    remembered = functools.cache(count)
    return lambda text: remembered(text) if len(text) < 1000 else count(text)


def task_set(
    model: Model, task: str, length: int, count: int, *, seed: int, haystack: tasks.Haystack | None, chat: bool,
    first: int = 0, tokens: Callable[[str], int] | None = None,
) -> EvalSet:  # fmt: skip
    """Samples `first` to `first + count - 1` of one task at one length.

    `tokens` counts: `token_counter(model)`, made once for several sets. Raises GenerationError as `tasks.make_sample`.
    """
    tokens = tokens or token_counter(model)
    made = []
    for index in range(first, first + count):
        sample = tasks.make_sample(task, length, index, seed=seed, count=tokens, haystack=haystack)
        ids = _encode(model, sample.prompt, chat)
        made.append(EvalSample(index, ids, sample.answers, sample.metric))
    return EvalSet(f"{task}/{length}", str(length), made)


def _encode(model: Model, prompt: str, chat: bool) -> list[int]:
    if chat:
        return model.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return model.tokenizer.encode(prompt)


def longbench_sets(
    path: Path, model: Model, *, metric: str | None, template: str, room: int, limit: int | None, chat: bool
) -> list[EvalSet]:
    """The data sets of a LongBench-format file: JSON lines with input, context, answers and, usually, dataset.

    A prompt longer than the model's context less `room` is cut in its middle, as LongBench does.
    Raises GenerationError for lines that are not of that form, and for data sets without a metric.
    """
    text = tasks.read_text(path)
    found: dict[str, list[EvalSample]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise GenerationError(f"{where} is not JSON: {error}") from error
        if not isinstance(record, dict) or not {"input", "context", "answers"} <= record.keys():
            raise GenerationError(f'{where} is not an object with "input", "context" and "answers"')
        answers = record["answers"]
        if not isinstance(answers, list) or not answers:
            raise GenerationError(f'{where} has no list of expected texts as its "answers"')
        dataset = str(record.get("dataset") or path.stem)
        chosen = found.setdefault(dataset, [])
        if limit is not None and len(chosen) >= limit:
            continue
        try:
            prompt = template.format(context=record["context"], input=record["input"])
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            raise GenerationError(f"the template is wrong ({error}); it may name {{context}} and {{input}}") from error
        ids = _encode(model, prompt, chat)
        most = model.config.max_position_embeddings - room
        if len(ids) > most:
            ids = ids[: most // 2] + ids[-(most - most // 2) :]
        kind = metric or metrics.longbench_metric(dataset)
        classes = record.get("all_classes") or ()
        if kind == "classification" and not (classes and isinstance(classes, list)):
            raise GenerationError(
                f'{where} has no list of class names as its "all_classes", which classification needs'
            )
        chosen.append(EvalSample(len(chosen), ids, tuple(map(str, answers)), kind, tuple(map(str, classes)), dataset))
    if not found:
        raise GenerationError(f"{path} holds no sample")
    return [EvalSet(name, "LongBench", samples) for name, samples in found.items()]
