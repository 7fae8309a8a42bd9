"""Long-context tasks made from a seed, at any length: needles, variable tracking, common words, questions over facts.

The kinds of task and the scoring are RULER's (arXiv 2404.06654; partial credit: the share of the expected strings that
the answer contains); wording, words and generators are ours. Facts are put at random depths into running text (the
haystack), and the length is counted with whatever tokenizer the model has.

A task builds a `Story`: the parts of a context and every question that can be asked about it. Evaluation asks the first
(`make_sample`); training asks several, which then share one prefix.
"""

from __future__ import annotations

import dataclasses
import gzip
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from herald_jax.errors import GenerationError
from herald_jax.task_words import ANIMALS, CITIES, JOBS, NAMES, NOUNS

HAYSTACK = Path(__file__).with_name("haystack.txt.gz")
PREAMBLE = "Read the text and answer the question at its end."
# Tokens kept free behind the prompt for the answer.
ANSWER_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Question:
    """A question and the strings its answer must contain, in the order in which a model is trained to give them."""

    text: str
    answers: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """What follows the context, up to where the answer begins."""
        return f"Question: {self.text} Answer:"

    @property
    def target(self) -> str:
        """The answer in full, as it continues `prompt`."""
        return f" {', '.join(self.answers)}."


@dataclasses.dataclass(frozen=True)
class Story:
    """Sentences of a context, in order, and what can be asked about them. The first question is the evaluation's."""

    parts: list[str]
    questions: list[Question]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt of an evaluation: `answers` are the expected strings, `metric` how they are scored (`metrics.py`)."""

    task: str
    index: int
    prompt: str
    answers: tuple[str, ...]
    metric: str


class Haystack:
    """Running text, sentence by sentence. Raises GenerationError for a text too short to hide anything in."""

    def __init__(self, text: str):
        self.sentences = sentences(text)
        if len(self.sentences) < 50:
            raise GenerationError(
                f"the haystack has {len(self.sentences)} sentences, but at least 50 are needed; give a longer text"
            )

    def run(self, rng: random.Random, budget: int, cost: Callable[[str], int]) -> list[str]:
        """Consecutive sentences from a random place, of at most `budget` tokens by `cost`."""
        at = rng.randrange(len(self.sentences))
        chosen: list[str] = []
        misses = 0
        while budget > 0 and misses < 8:
            sentence = self.sentences[at % len(self.sentences)]
            at += 1
            price = cost(sentence)
            if price > budget:
                misses += 1
                continue
            chosen.append(sentence)
            budget -= price
        return chosen


def read_text(path: str | Path) -> str:
    """The text of a user's file. Raises GenerationError if it is not UTF-8, OSError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise GenerationError(f"{path} is not UTF-8 text (byte {error.start})") from error


def sentences(text: str) -> list[str]:
    """The sentences of a text, white space normalised; fragments and monsters are left out."""
    flat = " ".join(text.split())
    found = (s.strip() for s in re.split(r"(?<=[.!?])\s+(?=[A-Z\"“‘(])", flat))
    return [s for s in found if 20 <= len(s) <= 400]


@cache
def default_haystack() -> Haystack:
    """The text that comes with the package: books of the World English Bible (public domain), not trained on."""
    return Haystack(gzip.decompress(HAYSTACK.read_bytes()).decode("utf-8"))


def _number(rng: random.Random) -> str:
    return str(rng.randrange(100_000, 1_000_000))


def _distinct_numbers(rng: random.Random, count: int) -> list[str]:
    return [str(n) for n in rng.sample(range(100_000, 1_000_000), count)]


def _hide(rng: random.Random, facts: Sequence[str], filler: list[str], *, in_order: bool = False) -> list[str]:
    """`facts` at random places in `filler`; `in_order` keeps their order."""
    places = [rng.randint(0, len(filler)) for _ in facts]
    if in_order:
        places.sort()
    parts: list[str] = []
    at: dict[int, list[str]] = {}
    for place, fact in zip(places, facts, strict=True):
        at.setdefault(place, []).append(fact)
    for i in range(len(filler) + 1):
        parts += at.get(i, [])
        parts += filler[i : i + 1]
    return parts


@dataclasses.dataclass(frozen=True)
class Maker:
    """What a task is given: its random numbers, the haystack, what a sentence costs, and how many tokens there are."""

    rng: random.Random
    haystack: Haystack
    cost: Callable[[str], int]
    budget: int

    def around(self, facts: Sequence[str], *, in_order: bool = False) -> list[str]:
        """`facts` hidden in as much of the haystack as the budget leaves room for."""
        left = self.budget - sum(map(self.cost, facts))
        return _hide(self.rng, facts, self.haystack.run(self.rng, left, self.cost), in_order=in_order)

    def room_for(self, fact: str, wanted: int) -> int:
        """How many facts like `fact`, `wanted` at most, fit into the budget."""
        return max(1, min(wanted, self.budget // max(self.cost(fact), 1)))


def _needle(key: str, number: str) -> str:
    return f"The magic number of the {key} is {number}."


def _ask_needle(key: str, number: str) -> Question:
    return Question(f"What is the magic number of the {key}?", (number,))


def _needles(make: Maker, count: int) -> Story:
    count = make.room_for(_needle("window", "123456"), count)
    keys, numbers = make.rng.sample(NOUNS, count), _distinct_numbers(make.rng, count)
    parts = make.around([_needle(k, n) for k, n in zip(keys, numbers, strict=True)])
    pairs = list(zip(keys, numbers, strict=True))
    make.rng.shuffle(pairs)
    return Story(parts, [_ask_needle(k, n) for k, n in pairs])


def single_needle(make: Maker) -> Story:
    """One fact in the whole text."""
    return _needles(make, 1)


def multi_key(make: Maker) -> Story:
    """Many facts of the same form, one in about 100 tokens (at least four); one of them is asked for."""
    return _needles(make, max(4, make.budget // 100))


def multi_needle(make: Maker) -> Story:
    """Eight facts; a question asks for two of them."""
    count = max(2, make.room_for(_needle("window", "123456"), 8))
    keys, numbers = make.rng.sample(NOUNS, count), _distinct_numbers(make.rng, count)
    parts = make.around([_needle(k, n) for k, n in zip(keys, numbers, strict=True)])
    questions = []
    for _ in range(count):
        a, b = make.rng.sample(range(count), 2)
        text = f"What are the magic numbers of the {keys[a]} and the {keys[b]}?"
        questions.append(Question(text, (numbers[a], numbers[b])))
    return Story(parts, questions)


def multi_value(make: Maker) -> Story:
    """Keys with three values each, stated in three places; all three are asked for."""
    per_key = 3
    keys = make.rng.sample(NOUNS, max(1, min(3, make.room_for(_needle("window", "123456"), 3 * per_key) // per_key)))
    stated = [(key, n) for key in keys for n in _distinct_numbers(make.rng, per_key)]
    make.rng.shuffle(stated)
    parts = make.around([_needle(k, n) for k, n in stated], in_order=True)
    questions = [
        Question(f"What are all the magic numbers of the {key}?", tuple(n for k, n in stated if k == key))
        for key in keys
    ]
    return Story(parts, questions)


def variable_tracking(make: Maker) -> Story:
    """Chains of assignments over two hops (RULER's default is four); which variables hold a value is asked."""
    hops, first, later = 2, "VAR window = 123456.", "VAR window = VAR lantern."
    per_chain = make.cost(first) + hops * make.cost(later)
    count = max(1, min(3, make.budget // per_chain))
    names = make.rng.sample(NOUNS, count * (hops + 1))
    values = _distinct_numbers(make.rng, count)
    chains = [names[i * (hops + 1) : (i + 1) * (hops + 1)] for i in range(count)]
    # Interleaved at random, but each chain in its own order.
    order = [i for i in range(count) for _ in range(hops + 1)]
    make.rng.shuffle(order)
    seen = [0] * count
    facts = []
    for i in order:
        step = seen[i]
        facts.append(f"VAR {chains[i][step]} = " + (f"VAR {chains[i][step - 1]}." if step else f"{values[i]}."))
        seen[i] += 1
    parts = make.around(facts, in_order=True)
    asked = list(zip(values, chains, strict=True))
    make.rng.shuffle(asked)
    return Story(parts, [Question(f"Which variables hold the value {v}?", tuple(chain)) for v, chain in asked])


def common_words(make: Maker) -> Story:
    """A list of words that fills the length; the three most common ones are asked for.

    They make up 14, 11 and 8 percent of the list, any other word a few tenths of that.
    """
    intro = "Here is a list of words:"
    count = max(12, int((make.budget - make.cost(intro)) / max(make.cost("window lantern") / 2, 1)))
    times = [max(2, round(share * count)) for share in (0.14, 0.11, 0.08)]
    for i in (1, 0):  # in a short list, too, each is more common than the next
        times[i] = max(times[i], times[i + 1] + 1)
    rest = max(0, count - sum(times))
    # So many other words that none is more than half as common as the third.
    other = min(len(NOUNS) - 3, max(make.budget // 8, -(-rest // (times[2] // 2)), 1))
    words = make.rng.sample(NOUNS, 3 + other)
    common, others = words[:3], words[3:]
    listed = [word for word, n in zip(common, times, strict=True) for _ in range(n)]
    listed += [others[i % other] for i in range(rest)]
    make.rng.shuffle(listed)
    question = Question("What are the three most common words in the list?", tuple(common))
    return Story([intro, " ".join(listed) + "."], [question])


_RELATIONS = (
    ("{} lives in {}.", "Where does {} live?", CITIES),
    ("{} works as a {}.", "What is the occupation of {}?", JOBS),
    ("{} was born in {}.", "Where was {} born?", CITIES),
    ("{} has a pet {}.", "What pet does {} have?", ANIMALS),
)


def fact_qa(make: Maker) -> Story:
    """Statements about people, one in about 100 tokens (at least four); one of them is asked about."""
    count = make.room_for(_RELATIONS[0][0].format("Hanna", "Lisbon"), max(4, make.budget // 100))
    chosen: dict[tuple[str, int], str] = {}
    people = make.rng.sample(NAMES, min(len(NAMES), max(2, count // 2)))
    for _ in range(count):
        key = (make.rng.choice(people), make.rng.randrange(len(_RELATIONS)))
        chosen.setdefault(key, make.rng.choice(_RELATIONS[key[1]][2]))
    facts = [_RELATIONS[r][0].format(name, value) for (name, r), value in chosen.items()]
    questions = [Question(_RELATIONS[r][1].format(name), (value,)) for (name, r), value in chosen.items()]
    make.rng.shuffle(questions)
    return Story(make.around(facts), questions)


TASKS: dict[str, Callable[[Maker], Story]] = {
    task.__name__: task
    for task in (single_needle, multi_needle, multi_key, multi_value, variable_tracking, common_words, fact_qa)
}

# How many questions a context of each task has at most, whatever its length; the others grow with it.
MOST_QUESTIONS = {"single_needle": 1, "multi_needle": 8, "multi_value": 3, "variable_tracking": 3, "common_words": 1}


def make_sample(
    task: str,
    length: int,
    index: int,
    *,
    seed: int,
    count: Callable[[str], int],
    haystack: Haystack | None = None,
) -> Sample:
    """Sample `index` of a task: the same for the same seed, length, tokenizer and haystack, whatever else is asked for.

    Args:
      task: a name in `TASKS`.
      length: tokens of prompt and answer together, at most; the prompt comes close to it from below.
      count: tokens of a text.
      haystack: None takes the package's own text.

    Raises:
      GenerationError: an unknown task, or a length that has no room for the question.
    """
    if task not in TASKS:
        raise GenerationError(f"task is {task!r}, but must be one of {', '.join(TASKS)}")
    rng = random.Random(f"{task}/{length}/{seed}/{index}")
    story, question = None, None
    # What sentences cost one by one is not exactly what they cost joined: shrink until the whole fits.
    for reserve in (64, 80, 112, 176, 304):
        budget = length - ANSWER_TOKENS - reserve
        if budget < 16:
            break
        story = TASKS[task](Maker(rng, haystack or default_haystack(), lambda s: count(" " + s), budget))
        question = story.questions[0]
        prompt = " ".join([PREAMBLE, *story.parts, question.prompt])
        if count(prompt) + ANSWER_TOKENS <= length:
            return Sample(task, index, prompt, question.answers, "all")
    raise GenerationError(f"a length of {length} tokens leaves no room for task {task}; give a longer one")
