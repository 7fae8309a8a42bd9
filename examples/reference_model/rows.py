"""Training rows of the reference model: documents of many lengths packed into rows of a few, made by worker processes.

A row holds several documents that cannot see each other, each with positions of its own. So the lengths that are
trained on can grow smoothly while the shapes that are compiled stay few. Between a context and its questions positions
may jump ahead (arXiv 2309.10400): short documents then teach long distances.
"""

from __future__ import annotations

import dataclasses
import gzip
import os
import random
from pathlib import Path

import numpy as np

from herald_jax import tasks
from herald_jax.text import load_tokenizer
from herald_jax.train_data import Document, choose_blocks, story_document

BLOCK = 32
# Lengths of documents, in the order of the curriculum.
LEVELS = (128, 256, 512, 1024, 2048, 4096, 8192)
# What a document can be: a task by itself, or several in one context.
NAMES = (*tasks.TASKS, "mixed")
MIXED = NAMES.index("mixed")
TEXT = -1  # the "name" of running text
# Kinds of token: context, answer, filling behind an answer, running text.
CONTEXT, ANSWER, FILLING, RUNNING = range(4)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One compiled shape: rows of `length` tokens, `batch` of them, `copies` noisy blocks in each."""

    length: int
    batch: int
    copies: int


@dataclasses.dataclass(frozen=True)
class Order:
    """What a worker is asked for: the step's number, its shape, and the longest level it may use."""

    step: int
    shape: Shape
    level: int


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Arrays of one step; B rows, N tokens, S copies, N // M blocks.

    Attributes:
      tokens: u16[B, N]; kind: u8[B, N].
      first: i32[B, N // M], first block of each block's document; start: i32[B, N // M], each block's first position.
      at: i32[B, S]; level, task: i32[B, S], of the copied blocks' documents.
    """

    tokens: np.ndarray
    kind: np.ndarray
    first: np.ndarray
    start: np.ndarray
    at: np.ndarray
    level: np.ndarray
    task: np.ndarray


class RowMaker:
    """Makes the rows of any step; every worker process has one."""

    def __init__(self, corpus: Path, tokenizer: Path, *, seed: int, context: int, sentences: int | None = None):
        from examples.reference_model.tokenizer import END, WordEncoder

        with gzip.open(corpus, "rt", encoding="utf-8") as lines:
            text = lines.read().split("\n")[:sentences]
        backend = load_tokenizer(tokenizer)
        self.encode = WordEncoder(lambda piece: backend.encode(piece, add_special_tokens=False))
        self.haystack = tasks.Haystack("\n".join(text))
        self.encode.remember([" " + sentence for sentence in self.haystack.sentences])
        end = backend.token_to_id(END)
        assert end is not None
        self.end, self.seed, self.context = end, seed, context

    def _level(self, rng: random.Random, top: int, room: int) -> int:
        """A level that fits into `room` tokens: most often the top one, sometimes any below."""
        fitting = [i for i in range(top + 1) if LEVELS[i] <= room]
        if not fitting:
            return -1
        dice = rng.random()
        if dice < 0.55 or len(fitting) == 1:
            return fitting[-1]
        return fitting[-2] if dice < 0.75 else rng.choice(fitting)

    def _text(self, rng: random.Random, length: int) -> Document:
        ids: list[int] = []
        at = rng.randrange(len(self.haystack.sentences))
        while len(ids) < length:
            ids.extend(self.encode(" " + self.haystack.sentences[at % len(self.haystack.sentences)]))
            at += 1
        return Document(ids[:length], [RUNNING] * length)

    def _row(self, rng: random.Random, shape: Shape, top: int) -> tuple[np.ndarray, ...]:
        length, block = shape.length, BLOCK
        tokens, kind = np.full(length, self.end, np.uint16), np.zeros(length, np.uint8)
        first, start = np.zeros(length // block, np.int32), np.zeros(length // block, np.int32)
        levels, names = np.zeros(length // block, np.int32), np.full(length // block, TEXT, np.int32)
        answers: list[int] = []
        running: list[int] = []
        used = 0
        while used < length:
            room = length - used
            level = self._level(rng, top, room)
            if level < 0 or rng.random() < 0.04:
                document, name = self._text(rng, min(room, 512)), TEXT
            else:
                # One question in a long context teaches little for its cost; of several tasks there are many.
                mixed = LEVELS[level] >= 512 and rng.random() < 0.5
                name = MIXED if mixed else rng.choices(range(MIXED), _WEIGHTS)[0]
                document = story_document(
                    mixed_story if mixed else NAMES[name], LEVELS[level], rng, encode=self.encode,
                    haystack=self.haystack, block=block, end=self.end, questions=max(2, LEVELS[level] // 160),
                )  # fmt: skip
            size = len(document.ids)
            here = slice(used, used + size)
            tokens[here], kind[here] = document.ids, document.kind
            blocks = np.arange(used // block, (used + size) // block)
            first[blocks], levels[blocks], names[blocks] = blocks[0], level, name
            start[blocks] = self._positions(rng, document, blocks - blocks[0])
            learned = kind[here].reshape(-1, block)
            answers += blocks[(learned == ANSWER).any(axis=1)].tolist()
            if name == TEXT:
                running += blocks[1:].tolist()
            used += size
        # Mostly answers, each once before any twice; some running text, so that the model also learns language.
        texts = rng.sample(running, min(len(running), max(1, shape.copies // 8)))
        at = np.sort(np.asarray([*texts, *choose_blocks(answers or texts or [0], shape.copies - len(texts), rng)]))
        return tokens, kind, first, start, at.astype(np.int32), levels[at], names[at]

    def _positions(self, rng: random.Random, document: Document, blocks: np.ndarray) -> np.ndarray:
        """Position of each block's first token; sometimes with one or two jumps."""
        start = blocks * BLOCK
        spare = (self.context - len(document.ids)) // BLOCK
        if spare > 0 and len(blocks) > 1 and rng.random() < 0.5:
            for _ in range(rng.randint(1, 2)):
                jump = int(spare * rng.random() ** 2) // 2
                start = start + np.where(blocks >= rng.randrange(1, len(blocks)), jump * BLOCK, 0)
        return start

    def rows(self, order: Order) -> PackedRows:
        """The rows of one step, a function of the seed and the order alone."""
        made = [
            self._row(random.Random(f"reference/{self.seed}/{order.step}/{row}"), order.shape, order.level)
            for row in range(order.shape.batch)
        ]
        return PackedRows(*(np.stack(column) for column in zip(*made, strict=True)))


_WEIGHTS = [{"multi_key": 3.0, "common_words": 1.5, "single_needle": 1.5}.get(name, 2.0) for name in tasks.TASKS]


def mixed_story(make: tasks.Maker) -> tasks.Story:
    """Needles of one kind, variables and facts in one context, each in its own order, and all of their questions."""
    rng = make.rng
    needles = rng.choice((tasks.multi_key, tasks.multi_needle, tasks.multi_value))
    shares = ((needles, 0.5), (tasks.variable_tracking, 0.2), (tasks.fact_qa, 0.3))
    stories = [task(dataclasses.replace(make, budget=int(share * make.budget))) for task, share in shares]
    order = [i for i, story in enumerate(stories) for _ in story.parts]
    rng.shuffle(order)
    parts = [iter(story.parts) for story in stories]
    questions = [question for story in stories for question in story.questions]
    rng.shuffle(questions)
    return tasks.Story([next(parts[i]) for i in order], questions)


_maker: RowMaker | None = None


def start_worker(corpus: str, tokenizer: str, seed: int, context: int, sentences: int | None) -> None:
    """Initialiser of a worker process."""
    global _maker
    os.environ["JAX_PLATFORMS"] = "cpu"  # a worker must never take the accelerator's memory
    _maker = RowMaker(Path(corpus), Path(tokenizer), seed=seed, context=context, sentences=sentences)


def make_rows(order: Order) -> PackedRows:
    """In a worker process: the rows of one step."""
    assert _maker is not None  # `start_worker` made it
    return _maker.rows(order)
