"""From text to training rows: token ids, which of them may become holes, and the blocks worth copying.

A row is whole blocks of documents laid end to end. In a document with questions only the answers are learned: they, and
the end-of-text tokens that fill the answer's last block, may become holes. Everything is drawn from (seed, step), so a
run that resumes sees what an uninterrupted run would have seen.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from herald_jax import tasks
from herald_jax.errors import GenerationError

Encode = Callable[[str], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Document:
    """Ids of whole blocks, and per id whether it may become a hole (1), or is filling behind an answer (2)."""

    ids: list[int]
    kind: list[int]


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a source yields for one step: tokens i32[B, N], maskable bool[B, N], at i32[B, S]."""

    tokens: np.ndarray
    maskable: np.ndarray
    at: np.ndarray


class Source(Protocol):
    """A source of training rows."""

    def rows(self, step: int) -> Rows: ...


class Turns:
    """Several sources in turn, one a step."""

    def __init__(self, sources: Sequence[Source]):
        self._sources = list(sources)

    def rows(self, step: int) -> Rows:
        return self._sources[step % len(self._sources)].rows(step)


def fill(document: Document, block: int, end: int) -> None:
    """Complete the last block with `end`, learned with the answer: it is how a model says that it has finished."""
    missing = -len(document.ids) % block
    document.ids.extend([end] * missing)
    document.kind.extend([2] * missing)


def story_document(
    task: str | Callable[[tasks.Maker], tasks.Story],
    length: int,
    rng: random.Random,
    *,
    encode: Encode,
    haystack: tasks.Haystack,
    block: int,
    end: int,
    questions: int,
) -> Document:
    """A context of one task (or story) with up to `questions` questions, at most `length` tokens, in whole blocks.

    Each answer is followed by `end` up to the end of its block. Every question but the first begins with some running
    text, so that an answer may begin anywhere in a block.
    """

    def cost(sentence: str) -> int:
        return len(encode(" " + sentence))

    preamble = encode(tasks.PREAMBLE)
    tell = tasks.TASKS[task] if isinstance(task, str) else task
    known = tasks.MOST_QUESTIONS.get(task, questions) if isinstance(task, str) else questions
    most = max(1, min(questions, known, length // (3 * block)))
    asked = 48 + (most - 1) * 2 * block
    budget = max(24, length - len(preamble) - asked - rng.randrange(block))
    story = tell(tasks.Maker(rng, haystack, cost, budget))
    document = Document(list(preamble), [0] * len(preamble))
    for part in story.parts:
        ids = encode(" " + part)
        document.ids.extend(ids)
    for number, question in enumerate(story.questions[:most]):
        lead: Sequence[int] = ()
        if number:
            lead = encode(" " + rng.choice(haystack.sentences))[: rng.randrange(block)]
        prompt, target = encode(" " + question.prompt), encode(question.target)
        size = len(document.ids) + len(lead) + len(prompt) + len(target)
        if number and -(-(size + 1) // block) * block > length:
            break
        document.ids.extend([*lead, *prompt])
        document.kind.extend([0] * (len(document.ids) - len(document.kind)))
        document.ids.extend([*target, end])
        document.kind.extend([1] * len(target) + [2])
        fill(document, block, end)
    cut = length // block * block
    return Document(document.ids[:cut], document.kind[:cut])


class TaskRows:
    """Rows of one document each, from the synthetic tasks; `seed` never meets an evaluation's."""

    def __init__(
        self, names: Sequence[str], *, length: int, batch: int, copies: int, encode: Encode, block: int, end: int,
        seed: int, haystack: tasks.Haystack | None = None, questions: int = 8,
    ):  # fmt: skip
        for name in names:
            if name not in tasks.TASKS:
                raise GenerationError(f"task is {name!r}, but must be one of {', '.join(tasks.TASKS)}")
        self._names, self._length, self._batch, self._copies = list(names), length, batch, copies
        self._encode, self._block, self._end, self._seed = encode, block, end, seed
        self._haystack, self._questions = haystack or tasks.default_haystack(), questions

    def rows(self, step: int) -> Rows:
        made = []
        for row in range(self._batch):
            rng = random.Random(f"train/{self._seed}/{step}/{row}")
            name = rng.choice(self._names)
            document = story_document(
                name, self._length, rng, encode=self._encode, haystack=self._haystack, block=self._block,
                end=self._end, questions=self._questions,
            )  # fmt: skip
            made.append((document, rng))
        return pack([([document], rng) for document, rng in made], self._length, self._block, self._end, self._copies)


def pack(
    rows: Sequence[tuple[Sequence[Document], random.Random]], length: int, block: int, end: int, copies: int
) -> Rows:
    """Rows of documents, filled up with `end`. Of each row's blocks with holes, `copies` are chosen at random.

    Where there are fewer, blocks are chosen more than once (each is noised anew), in ascending order.
    """
    tokens = np.full((len(rows), length), end, np.int32)
    maskable = np.zeros((len(rows), length), bool)
    at = np.zeros((len(rows), copies), np.int32)
    for i, (documents, rng) in enumerate(rows):
        ids = [t for d in documents for t in d.ids][:length]
        kind = [k for d in documents for k in d.kind][:length]
        tokens[i, : len(ids)] = ids
        maskable[i, : len(ids)] = np.asarray(kind) > 0
        learned = np.flatnonzero(maskable[i].reshape(-1, block).any(axis=1)).tolist()
        at[i] = choose_blocks(learned, copies, rng)
    return Rows(tokens, maskable, at)


def choose_blocks(blocks: Sequence[int], copies: int, rng: random.Random) -> list[int]:
    """`copies` of `blocks`, each as often as any other, ascending. Zeros when there is nothing to learn."""
    if not blocks:
        return [0] * copies
    whole, rest = divmod(copies, len(blocks))
    return sorted(list(blocks) * whole + rng.sample(list(blocks), rest))


class TextRows:
    """Rows from a file: running text (everything is learned), or prompts with answers (the answers are learned).

    A `.jsonl` file has objects with "text", or with "prompt" and "answer"; any other file is one text.
    """

    def __init__(
        self, path: str | Path, *, length: int, batch: int, copies: int, encode: Encode, block: int, end: int, seed: int
    ):
        self._length, self._batch, self._copies, self._block = length, batch, copies, block
        self._end, self._seed = end, seed
        self._documents = [_document(record, encode, block, end) for record in _records(Path(path))]
        self._total = sum(len(d.ids) for d in self._documents)

    def rows(self, step: int) -> Rows:
        made = []
        for row in range(self._batch):
            rng = random.Random(f"text/{self._seed}/{step}/{row}")
            chosen: list[Document] = []
            size = 0
            while size < self._length:
                document = rng.choice(self._documents)
                if not chosen and len(document.ids) > self._length:  # a window of a long text
                    start = rng.randrange((len(document.ids) - self._length) // self._block + 1) * self._block
                    document = Document(document.ids[start:], document.kind[start:])
                chosen.append(document)
                size += len(document.ids)
            made.append((chosen, rng))
        return pack(made, self._length, self._block, self._end, self._copies)


def _records(path: Path) -> list[dict[str, Any]]:
    text = tasks.read_text(path)
    if path.suffix != ".jsonl":
        if not text.strip():
            raise GenerationError(f"{path} holds no text to train on")
        return [{"text": text}]
    records = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise GenerationError(f"line {number} of {path} is not JSON: {error}") from error
        wanted = isinstance(record, dict) and ({"text"} <= record.keys() or {"prompt", "answer"} <= record.keys())
        if not wanted:
            raise GenerationError(
                f'line {number} of {path} is not an object with "text", or with "prompt" and "answer"'
            )
        records.append(record)
    if not records:
        raise GenerationError(f"{path} holds nothing to train on")
    return records


def _document(record: dict[str, Any], encode: Encode, block: int, end: int) -> Document:
    if "text" in record:
        ids = list(encode(str(record["text"])))
        document = Document([*ids, end], [1] * (len(ids) + 1))
    else:
        prompt, answer = list(encode(str(record["prompt"]))), list(encode(str(record["answer"])))
        document = Document([*prompt, *answer, end], [0] * len(prompt) + [1] * (len(answer) + 1))
    fill(document, block, end)
    return document
