"""Scores of an answer against expected strings, in [0, 1].

RULER's (arXiv 2404.06654): the share of the expected strings that the answer contains, or whether it contains any.
LongBench's (arXiv 2308.14508): token F1, ROUGE-L, edit similarity of a line of code, accuracy of classification, of
retrieval and of counting, each with its own normalisation; the best over the references counts.
"""

from __future__ import annotations

import collections
import difflib
import re
import string
from collections.abc import Callable, Sequence

from herald_jax.errors import GenerationError


def match_all(answer: str, expected: Sequence[str]) -> float:
    """RULER's partial credit: the share of `expected` found in the answer, whatever the case."""
    text = answer.lower()
    return sum(one.lower() in text for one in expected) / len(expected)


def match_any(answer: str, expected: Sequence[str]) -> float:
    """RULER's score of question answering: 1 if any of `expected` is found in the answer."""
    text = answer.lower()
    return float(any(one.lower() in text for one in expected))


_ARTICLES = re.compile(r"\b(a|an|the)\b")


def _plain_words(text: str) -> list[str]:
    """SQuAD's normalisation: lower case, no punctuation, no articles."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", kept).split()


def token_f1(answer: str, expected: Sequence[str]) -> float:
    """Harmonic mean of the precision and recall of words, best over the references."""

    def one(reference: str) -> float:
        ours, theirs = _plain_words(answer), _plain_words(reference)
        common = sum((collections.Counter(ours) & collections.Counter(theirs)).values())
        if common == 0:
            return 0.0
        precision, recall = common / len(ours), common / len(theirs)
        return 2 * precision * recall / (precision + recall)

    return max(map(one, expected))


def _common_words(a: Sequence[str], b: Sequence[str]) -> set[str]:
    """The words of a longest common subsequence. Of several, the one with the latest words of `b` left out first."""
    length = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            length[i + 1][j + 1] = length[i][j] + 1 if x == y else max(length[i][j + 1], length[i + 1][j])
    found = set()
    i, j = len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            found.add(a[i - 1])
            i, j = i - 1, j - 1
        elif length[i - 1][j] > length[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def rouge_l(answer: str, expected: Sequence[str]) -> float:
    """ROUGE-L of whole texts, best over the references, as the package `rouge` 1.0.1 computes it for LongBench.

    That is: sentences end at full stops; of every pair of sentences the words of their longest common subsequence; the
    distinct words so found, over the distinct words of answer and reference, give precision, recall and F1.
    """

    def sentences(text: str) -> list[list[str]]:
        return [" ".join(part.split()).split(" ") for part in text.split(".") if part]

    def one(reference: str) -> float:
        ours, theirs = sentences(answer), sentences(reference)
        if not ours or not theirs:
            return 0.0
        common = set().union(*(_common_words(r, o) for r in theirs for o in ours))
        precision = len(common) / len(set().union(*ours))
        recall = len(common) / len(set().union(*theirs))
        return 2 * precision * recall / (precision + recall + 1e-8)

    return max(map(one, expected))


def edit_similarity(answer: str, expected: Sequence[str]) -> float:
    """Similarity of the answer's first line that is code, best over the references.

    2 M / T as `difflib.SequenceMatcher` counts it, rounded to hundredths: what `fuzz.ratio` of the package fuzzywuzzy,
    which LongBench calls, gives without its optional C library.
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((x for x in lines if "`" not in x and "#" not in x and "//" not in x), "")

    def one(reference: str) -> float:
        if not line or not reference:
            return 0.0
        return round(difflib.SequenceMatcher(None, line, reference).ratio(), 2)

    return max(map(one, expected))


def classification(answer: str, expected: Sequence[str], classes: Sequence[str] = ()) -> float:
    """1 over the number of class names in the answer when the right one is among them.

    Names that are only part of another found name of the right class do not count against it.
    """

    def one(reference: str) -> float:
        found = [name for name in classes if name in answer]
        found = [name for name in found if not (name in reference and name != reference)]
        return 1 / len(found) if reference in found else 0.0

    return max(map(one, expected))


def retrieval(answer: str, expected: Sequence[str]) -> float:
    """Share of the numbers in the answer that are the number of the right paragraph."""
    numbers = re.findall(r"\d+", answer)

    def one(reference: str) -> float:
        right = re.findall(r"Paragraph (\d+)", reference)
        return numbers.count(right[0]) / len(numbers) if numbers and right else 0.0

    return max(map(one, expected))


def counting(answer: str, expected: Sequence[str]) -> float:
    """Share of the numbers in the answer that are the right one."""
    numbers = re.findall(r"\d+", answer)
    return max(numbers.count(str(reference)) / len(numbers) if numbers else 0.0 for reference in expected)


METRICS: dict[str, Callable[..., float]] = {
    "all": match_all,
    "any": match_any,
    "f1": token_f1,
    "rouge_l": rouge_l,
    "edit": edit_similarity,
    "classification": classification,
    "retrieval": retrieval,
    "counting": counting,
}

# LongBench's English data sets and their metrics, from its own table.
LONGBENCH = {
    "narrativeqa": "f1", "qasper": "f1", "multifieldqa_en": "f1", "hotpotqa": "f1", "2wikimqa": "f1", "musique": "f1",
    "triviaqa": "f1", "gov_report": "rouge_l", "qmsum": "rouge_l", "multi_news": "rouge_l", "samsum": "rouge_l",
    "trec": "classification", "passage_retrieval_en": "retrieval", "passage_count": "counting", "lcc": "edit",
    "repobench-p": "edit",
}  # fmt: skip
# Of these, the answer is cut to its first line before it is scored.
FIRST_LINE = {"trec", "triviaqa", "samsum", "lsht"}


def longbench_metric(dataset: str) -> str:
    """The metric of a LongBench data set ("qasper", "qasper_e"). Raises GenerationError for one without any here."""
    name = dataset.removesuffix("_e")
    if name not in LONGBENCH:
        raise GenerationError(
            f"data set {dataset!r} has no metric here; give one with --metric, of {', '.join(METRICS)}, or use one of "
            f"{', '.join(LONGBENCH)}"
        )
    return LONGBENCH[name]


def score(
    metric: str, answer: str, expected: Sequence[str], *, classes: Sequence[str] = (), dataset: str = ""
) -> float:
    """The score of one answer by the metric's name."""
    if dataset.removesuffix("_e") in FIRST_LINE:
        answer = answer.lstrip("\n").split("\n")[0]
    if metric == "classification":
        return classification(answer, expected, classes)
    return METRICS[metric](answer, expected)
