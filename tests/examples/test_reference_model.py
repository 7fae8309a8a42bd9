"""The reference model's recipe, end to end and tiny: from text to a checkpoint that converts and writes."""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest

import herald_jax
from convert import __main__ as convert_command
from convert.converter import convert
from examples.reference_model import corpus, curriculum, export, finish, rows, tokenizer, train
from herald_jax import cli, demo, tasks
from herald_jax.config import GenerateConfig
from herald_jax.model import flatten
from herald_jax.text import load_tokenizer

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus: some of the package's own haystack."""
    path = tmp_path_factory.mktemp("corpus") / corpus.TRAIN
    corpus.write(path, tasks.default_haystack().sentences[:600])
    return path


@pytest.fixture(scope="module")
def tokens(text: Path) -> Path:
    with gzip.open(text, "rt") as lines:
        sentences = lines.read().split("\n")
    tokenizer.save(tokenizer.train_tokenizer(sentences, 2048), text.parent / "tokenizer")
    return text.parent / "tokenizer"


@pytest.fixture(scope="module")
def maker(text: Path, tokens: Path) -> rows.RowMaker:
    return rows.RowMaker(text, tokens, seed=0, context=4096)


def test_piecewise_encoding_is_the_tokenizers(maker: rows.RowMaker, tokens: Path) -> None:
    from herald_jax.text import load_tokenizer

    backend = load_tokenizer(tokens)
    for task in tasks.TASKS:
        sample = tasks.make_sample(
            task, 300, 0, seed=1, count=lambda s: len(backend.encode(s)), haystack=maker.haystack
        )
        expected = backend.encode(sample.prompt)
        pieces = maker.encode(sample.prompt)
        assert pieces == expected
        parts = sample.prompt.split(". ")
        joined = [*maker.encode(parts[0] + "."), *(i for p in parts[1:-1] for i in maker.encode(f" {p}."))]
        assert [*joined, *maker.encode(" " + parts[-1])] == expected


def test_rows(maker: rows.RowMaker) -> None:
    """Documents fill the rows; what is learned is in the copied blocks; a row is a function of seed and step."""
    shape = rows.Shape(1024, 3, 10)
    order = rows.Order(7, shape, 2)
    made = maker.rows(order)
    again, other = maker.rows(order), maker.rows(rows.Order(8, shape, 2))
    assert all((getattr(made, n) == getattr(again, n)).all() for n in made.__dataclass_fields__)
    assert (made.tokens != other.tokens).any()
    blocks = made.kind.reshape(3, 32, 32)
    for row in range(3):
        starts = np.flatnonzero(made.first[row] == np.arange(32))
        assert len(starts) >= 2
        assert (np.diff(made.first[row]) >= 0).all()
        assert (made.start[row] % 32 == 0).all()
        for first in starts:
            inside = made.first[row] == first
            assert made.start[row][inside][0] == 0
            assert (np.diff(made.start[row][inside]) >= 32).all()  # forward, with jumps at times
        for at, name in zip(made.at[row], made.task[row], strict=True):
            learned = rows.RUNNING if name == rows.TEXT else rows.ANSWER
            assert (blocks[row, at] == learned).any()
    assert (np.diff(made.at, axis=1) >= 0).all()
    assert set(made.level.ravel()) <= {-1, 0, 1, 2}
    gaps = np.diff(made.start, axis=1)
    assert (gaps > 32).any(), "no position ever jumped ahead"


def test_curriculum_advances_when_answers_are_right() -> None:
    shapes = (rows.Shape(256, 2, 2), rows.Shape(1024, 2, 2))
    learning = curriculum.Curriculum(shapes, 0, advance_at=0.8)
    counts = np.zeros((len(rows.LEVELS), len(rows.NAMES), 2))
    counts[0, :, 0] = 30
    learning.add(counts)
    assert not learning.update(0.1)
    assert learning.stuck()
    good = counts.copy()
    good[0, :, 1] = 27
    for _ in range(9):
        learning.add(good)
    assert not learning.stuck()
    assert learning.update(0.1)
    assert learning.level == 1
    assert learning.accuracy(0) == {}
    assert learning.shape(0).length == 256
    learning.level = 2
    assert learning.shape(0).length == 1024
    assert learning.shape(8).length == 256
    # Half right is enough once most of the time is over.
    half = np.zeros_like(counts)
    half[2, :, 0], half[2, :, 1] = 30, 15
    learning.add(half)
    assert not learning.update(0.5)
    assert learning.update(0.9)


@pytest.mark.slow
def test_recipe_end_to_end(text: Path, tokens: Path, tmp_path: Path) -> None:
    """Train, resume, and run what came out through the converter and the block loop."""
    arguments = argparse.Namespace(
        minutes=5.0, steps=4, out=tmp_path / "one", corpus=text, tokenizer=tokens, resume=None, level=0, decay=0.2,
        attention="auto", workers=1, devices=1, seed=0,
    )  # fmt: skip
    train.run(arguments, train.TINY)
    arguments.out, arguments.resume, arguments.steps, arguments.tokenizer = tmp_path / "two", tmp_path / "one", 2, None
    train.run(arguments, train.TINY)
    log = [json.loads(line) for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["finished"]["steps"] == 2
    assert (tmp_path / "two" / "curve.png").is_file()

    one, two = (export.join_pieces(tmp_path / name, tmp_path / f"hf-{name}") for name in ("one", "two"))
    assert convert(two, tmp_path / "model").config.diffusion.block_length == rows.BLOCK
    model = herald_jax.load(tmp_path / "model")
    before, after = (flatten(export.from_hf(model.config, directory)) for directory in (one, two))
    assert any((before[path] != after[path]).any() for path in before)
    # The converter and `from_hf` read the same file to the same parameters, and `to_hf` undoes it.
    for path, leaf in flatten(model.params).items():
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), after[path], err_msg=path)
    result = herald_jax.generate(model, ["Read the text. Question: Who? Answer:"], GenerateConfig(max_new_tokens=8))
    assert result.errors == {}
    assert 0 < len(result.tokens[0]) <= 8

    finish.finish(tmp_path / "two", tmp_path / "final" / "reference")
    card = (tmp_path / "final" / "reference" / "README.md").read_text()
    assert "2 layers, hidden size\n32, 2 query and 1 KV heads of 16, block length 32" in card
    assert "2 steps" in card
    assert not (tmp_path / "final" / "reference" / "training.json").exists()


def test_demo_of_a_stand_in(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The demo's own commands on a model of the shipped one's form and files, with random weights."""
    table = load_tokenizer(tokens)
    end, mask = table.token_to_id(tokenizer.END), table.token_to_id(tokenizer.MASK)
    assert end is not None
    assert mask is not None
    config = export.model_config(
        vocab_size=table.vocab_size, hidden=32, mlp=32, layers=3, heads=2, kv_heads=1, head_dim=16, context=4096,
        block=rows.BLOCK, end=end, mask=mask,
    )  # fmt: skip
    export.write_hf(tmp_path / "reference", config, train.initial_params(config, 0), tokens, "card")
    monkeypatch.setattr(demo, "REFERENCE", tmp_path / "reference")
    commands = demo.reference_commands(tmp_path / "models")
    assert [command[0] for command in commands] == ["herald-convert", "herald-generate", "herald-generate"]
    run = {"herald-convert": convert_command.main, "herald-generate": cli.main}
    for name, *arguments in commands:
        assert run[name](arguments) == 0
    report = capfd.readouterr()
    assert report.out.count("(expected: ") == 3
    assert report.err.count("rows                3") == 2
    assert "sparse blocks" in report.err


def test_pieces(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    content = random.Random(0).randbytes(5000)
    (source / "model.safetensors").write_bytes(content)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.tar.09").write_bytes(b"left from an earlier run")
    pieces = export.split_directory(source, tmp_path / "out", size=4096)
    assert all(piece.stat().st_size <= 4096 for piece in pieces)
    joined = export.join_pieces(tmp_path / "out", tmp_path / "back")
    assert (joined / "model.safetensors").read_bytes() == content


def test_corpus_cleaning(tmp_path: Path) -> None:
    assert corpus.plain("“It’s”  a – test…") == '"It\'s" a - test...'
    wordnet = tmp_path / "wordnet"
    wordnet.mkdir()
    (wordnet / "data.noun").write_text(
        '  1 licence\n15299783 28 n 01 window_box 0 001 @ 15113229 n 0000 | a box for plants; "he has one"  \n'
    )
    assert list(corpus.glosses(tmp_path)) == ["Window box means a box for plants."]
    (tmp_path / "a.rst.txt").write_text(
        "Title\n=====\n\nUse :func:`len` on a ``list``\nof things.\n\n.. note::\n\n   code\n"
    )
    assert list(corpus.python_docs(tmp_path)) == ["Use len on a list of things."]
    (tmp_path / "b.html").write_text("<h1>No</h1><p>A &lt;b&gt; <em>word</em>.</p>")
    assert list(corpus.postgres_docs(tmp_path)) == ["A <b> word."]
