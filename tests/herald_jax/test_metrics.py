"""The metrics: RULER's by their definition, LongBench's against values of the packages it calls, or worked by hand."""

from __future__ import annotations

import pytest

from herald_jax import metrics
from herald_jax.errors import GenerationError


def test_ruler() -> None:
    assert metrics.match_all("It is 12, and Rome.", ["12", "rome", "13"]) == pytest.approx(2 / 3)
    assert metrics.match_any("It is 12.", ["13", "12"]) == 1
    assert metrics.match_any("It is 12.", ["13"]) == 0


# By hand: 3 common words of 3 and 4 (articles and punctuation gone); of 1 and 2; none.
@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("The cat sat down.", "cat, sat down today", 2 * 1.0 * 0.75 / 1.75),
        ("an apple", "Apple pie!", 2 / 3),
        ("the", "a", 0.0),
        ("rome rome", "Rome", 2 / 3),
    ],
)
def test_token_f1(answer: str, reference: str, value: float) -> None:
    assert metrics.token_f1(answer, ["nothing here", reference]) == pytest.approx(value)


# What rouge 1.0.1 (PyPI) gives: Rouge().get_scores([answer], [reference], avg=True)["rouge-l"]["f"].
@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("the cat sat on the mat", "the cat was on a mat", 0.7272727223140496),
        ("Two dogs ran. A cat sat on the mat.", "A cat sat. The dogs ran home on the mat.", 0.8421052581717452),
        ("one two three", "four five", 0.0),
        ("a b c d e f g", "g f e d c b a", 0.14285713785714302),
        (
            "The council met on Monday. It voted for the budget.  Nobody spoke.",
            "On Monday the council met and voted. The budget passed.",
            0.4545454495867769,
        ),
    ],
)
def test_rouge_l(answer: str, reference: str, value: float) -> None:
    assert metrics.rouge_l(answer, [reference]) == pytest.approx(value, abs=1e-12)
    assert metrics.rouge_l("", [reference]) == 0


def test_edit_similarity() -> None:
    """By hand: 3 of 4 characters match, 2 * 3 / 8; the first line that is code counts."""
    assert metrics.edit_similarity("abcd", ["abed"]) == 0.75
    assert metrics.edit_similarity("\n# a comment\n`x`\nabcd\nmore", ["abed"]) == 0.75
    assert metrics.edit_similarity("# only a comment", ["abed"]) == 0
    assert metrics.edit_similarity("return x", ["zzz", "return x"]) == 1


def test_accuracies() -> None:
    classes = ["Person", "Person group", "Place"]
    assert metrics.classification("A Person group", ["Person group"], classes) == 1
    assert metrics.classification("Place or Person", ["Person"], classes) == 0.5
    assert metrics.classification("Place", ["Person"], classes) == 0
    assert metrics.retrieval("Paragraph 3, or 4", ["Paragraph 3"]) == 0.5
    assert metrics.retrieval("none", ["Paragraph 3"]) == 0
    assert metrics.counting("There are 5", ["5"]) == 1
    assert metrics.counting("5 or 6 or 5", ["5"]) == pytest.approx(2 / 3)


def test_by_name() -> None:
    assert metrics.longbench_metric("qasper_e") == "f1"
    assert metrics.longbench_metric("lcc") == "edit"
    with pytest.raises(GenerationError, match="data set 'unknown' has no metric here"):
        metrics.longbench_metric("unknown")
    # triviaqa's answer is cut to its first line.
    assert metrics.score("f1", "\nRome\nand more words", ["Rome"], dataset="triviaqa_e") == 1
    assert metrics.score("f1", "Rome\nand more words", ["Rome"], dataset="qasper") < 1
    assert metrics.score("classification", "A Place", ["Place"], classes=["Place", "Person"], dataset="trec") == 1
