"""The tokenizer: byte-level BPE trained on the corpus and on task sentences, with every number below 1000 a token.

Words carry the space before them, digits come in groups of three. So text cut at white space can be encoded piece by
piece: `WordEncoder` does that with a table, which is what lets a few processes keep a GPU in training rows.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from herald_jax import tasks
from herald_jax.task_words import ANIMALS, CITIES, JOBS, NAMES, NOUNS

END, MASK = "<|endoftext|>", "<|MASK|>"
_WORDS = r" ?[A-Za-z]+(?:'[a-z]+)?|[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"


def train_tokenizer(sentences: Sequence[str], vocab_size: int, *, seed: int = 0) -> tokenizers.Tokenizer:
    """A tokenizer of `vocab_size` ids; the last two are `END` and `MASK`."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_texts(sentences, random.Random(seed)), trainer)
    backend.add_special_tokens([AddedToken(END, special=True), AddedToken(MASK, special=True)])
    return backend


def _texts(sentences: Sequence[str], rng: random.Random) -> Iterator[str]:
    """The sentences, and the tasks' words and numbers often enough for each to become one token."""
    yield from sentences
    words = [*NOUNS, *NAMES, *CITIES, *JOBS, *ANIMALS]
    haystack = tasks.Haystack(" ".join(sentences[:2000]))
    for name, task in tasks.TASKS.items():
        for _ in range(300):
            story = task(tasks.Maker(rng, haystack, lambda s: len(s) // 3, 200))
            yield " ".join(part for part in story.parts if len(part) < 120 or name == "common_words")
            yield from (question.prompt for question in story.questions)
    # Some words more often than any fragment of prose that would compete for the last places.
    often = max(50, len(sentences) // 200)
    for word in words:
        yield " ".join([""] + [word] * often)
    for number in range(1000):
        yield " ".join([""] + [f"{number:03d}"] * often)


def save(backend: tokenizers.Tokenizer, directory: Path) -> None:
    """The files a Hugging Face directory has."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "mask_token": MASK,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


class WordEncoder:
    """`encode` with a table of words seen before: the ids are the tokenizer's, at many times its speed."""

    _WORD = re.compile(r"\s*\S+|\s+")

    def __init__(self, encode: Callable[[str], Sequence[int]]):
        self._encode = encode
        self._words: dict[str, tuple[int, ...]] = {}
        self._sentences: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Ids of `text`. The list is shared between calls: do not change it."""
        known = self._sentences.get(text)
        if known is not None:
            return known
        ids: list[int] = []
        words = self._words
        for word in self._WORD.findall(text):
            found = words.get(word)
            if found is None:
                found = words[word] = tuple(self._encode(word))
            ids.extend(found)
        return ids

    def remember(self, texts: Sequence[str]) -> None:
        """Keep the ids of whole texts: those that come again, as a haystack's sentences do."""
        for text in texts:
            self._sentences[text] = self(text)
