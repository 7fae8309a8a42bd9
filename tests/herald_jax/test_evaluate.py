"""`herald-eval`: what it writes, that it resumes, and that what must agree agrees."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import herald_jax
from herald_jax import eval_report, eval_sets, evaluate, replay
from herald_jax.checkpoint import save_checkpoint
from herald_jax.config import GenerateConfig
from herald_jax.denoise import StaticLowConfidence, Threshold
from herald_jax.errors import GenerationError
from herald_jax.generate import SharedPrefill
from herald_jax.plans import Dense, Mage
from tests import tiny as checkpoint

# A budget of 0.05 of some 500 tokens, and of all of them.
RUN = [
    "--no-chat", "--tasks", "single_needle,fact_qa", "--lengths", "500", "--samples", "3", "--plan", "mage",
    "--min-budget", "1", "--dense-layers", "0", "--budgets", "0.05,1.0", "--max-new-tokens", "12",
    "--steps", "2", "--measure",
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(tmp_path_factory.mktemp("eval") / "model", max_position_embeddings=1024, num_layers=1)


@pytest.fixture(scope="module")
def first(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    out = tmp_path_factory.mktemp("eval") / "out"
    assert evaluate.main([str(source), "--output", str(out), *RUN]) == 0
    return out


def test_results(first: Path) -> None:
    results = json.loads((first / "results.json").read_text())
    rows = {(row["plan"], row["set"]): row for row in results["rows"]}
    assert len(rows) == 3 * 2
    for task in ("single_needle/500", "fact_qa/500"):
        dense, sparse, everything = (
            rows[plan, task]
            for plan in (
                "dense",
                "mage budget=0.05 dense_layers=0 min_budget=1",
                "mage budget=1.0 dense_layers=0 min_budget=1",
            )
        )
        assert dense["samples"] == 3
        assert dense["recall"] is None
        # Everything selected is dense: the same answers, the same steps, nothing sparse.
        assert everything["drop"] == 0
        assert everything["steps_per_block"] == dense["steps_per_block"]
        assert everything["sparse_share"] == 0
        assert sparse["sparse_share"] == 1
        assert 0 < sparse["recall"] <= 1
        assert 0 < sparse["mass_kept"] < 1
    text = (first / "results.md").read_text()
    assert text.count("\n| mage budget=0.05") == 1 + 2
    assert (first / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert {row["group"] for row in results["means"]} == {"500"}


def test_a_run_goes_on_where_it_stopped(
    source: Path, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (first / "answers.jsonl").read_text().splitlines(keepends=True)
    cut = tmp_path / "out"
    cut.mkdir()
    (cut / "answers.jsonl").write_text("".join(whole[:9]) + whole[9][:20])
    asked: list[str] = []
    plain = evaluate._answer
    monkeypatch.setattr(evaluate, "_answer", lambda *a: asked.append(a[2].name) or plain(*a))
    arguments = [str(source), "--output", str(cut), *RUN]
    assert evaluate.main(arguments) == 0
    assert len(asked) == 4  # of six sets, two were there
    results = (first / "results.json").read_text()
    assert json.loads(results) == json.loads((cut / "results.json").read_text())

    # Replays of a finished run are added to it, once.
    replayed: list[Any] = []
    monkeypatch.setattr(replay, "record", lambda model, ids, config: tuple(ids))
    monkeypatch.setattr(replay, "replay", lambda model, ids, plan: replayed.append((ids, plan)) or 0.75)
    for _ in range(2):
        assert evaluate.main([*arguments, "--replay", "2"]) == 0
    assert len(replayed) == len(set(replayed)) == 2 * 2 * 2
    rows = json.loads((cut / "results.json").read_text())["rows"]
    assert [row.get("replay_agreement") for row in rows] == [None, None, *[0.75] * 4]
    assert evaluate.main([*arguments, "--lengths", "400"]) == 2
    assert "was written with another lengths" in capsys.readouterr().err


def test_a_set_that_grows_is_as_one_asked_at_once(source: Path, tmp_path: Path) -> None:
    """Its last batch, of one sample, is answered again with the new one, and counts once."""
    results = []
    for name, sizes in (("grown", "34"), ("at_once", "4")):
        for samples in sizes:
            out = tmp_path / name
            assert (
                evaluate.main([str(source), "--output", str(out), *RUN, "--samples", samples, "--batch-size", "2"]) == 0
            )
        results.append(json.loads((out / "results.json").read_text())["rows"])
    assert results[0] == results[1]
    lines = [json.loads(line) for line in (tmp_path / "grown" / "answers.jsonl").read_text().splitlines()]
    assert [line["samples"] for line in lines if line.get("plan") == "dense" and "samples" in line][:2] == [[0, 1], [2]]


def test_a_journal_loses_nothing_and_is_not_taken_for_another(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"

    def journal(**settings: Any) -> evaluate.Journal:
        opened = evaluate.Journal(tmp_path, {"checkpoint": "x"} | settings)
        opened.close()
        return opened

    made = evaluate.Journal(tmp_path, {"checkpoint": "x"})
    answer = "what splits lines elsewhere: \x85 \u2028 \u2029"
    made.answered("dense", "qasper", [{"index": 0, "score": 1.0, "answer": answer}], dict.fromkeys(evaluate._COUNTS, 0))
    made.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[-20:-1])
    again = journal()
    assert [r["answer"] for r in again.answers] == [answer]
    assert again.done == {("dense", "qasper", 0)}
    assert path.read_bytes() == whole
    with pytest.raises(GenerationError, match="written with another chat"):
        journal(chat=True)
    lines = whole.splitlines(keepends=True)
    for damaged in (b"\xff\n", b"{\n", b"[]\n", lines[0] + b'{"index": 0}\n', lines[0] + b"\0" * 10 + b"\n"):
        path.write_bytes(damaged)
        with pytest.raises(GenerationError, match=r"answers.jsonl is damaged .*; remove it"):
            journal()
        assert path.read_bytes() == damaged


def test_a_bad_request_leaves_nothing_behind(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Or the right one would be refused for being another."""
    few = ["--no-chat", "--tasks", "single_needle", "--lengths", "500", "--samples", "1"]
    for flags, message in (
        (["--max-new-tokens", "900"], "the model's context is 1024 tokens"),
        (["--replay", "1", "--temperature", "0.5"], "a replay needs greedy decoding"),
        (["--plan", "mage"], "dense_layers is 2, but the model has 1 layers"),
    ):
        assert evaluate.main([str(source), "--output", str(tmp_path / "out"), *few, *flags]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_content_under_the_same_name_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "qasper.jsonl"
    record = {"input": "Who?", "context": "Ada.", "answers": ["Ada"]}
    data.write_text(json.dumps(record))
    arguments = [str(source), "--output", str(tmp_path / "out"), "--data", str(data), "--max-new-tokens", "4"]
    assert evaluate.main(arguments) == 0
    data.write_text(json.dumps(record | {"context": "Ben."}))
    assert evaluate.main(arguments) == 2
    assert f"was written with another content of {data}" in capsys.readouterr().err


def test_a_model_that_fails_is_reported(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = herald_jax.load(source)
    model.params["norm"]["scale"] = np.full_like(model.params["norm"]["scale"], np.nan)
    save_checkpoint(tmp_path / "nan", model.config, model.params, tokenizer_dir=model.tokenizer_dir)
    few = ["--no-chat", "--tasks", "single_needle", "--lengths", "500", "--samples", "2", "--max-new-tokens", "4"]
    assert evaluate.main([str(tmp_path / "nan"), "--output", str(tmp_path / "out"), *few]) == 1
    assert "2 answers ended early because the model produced NaN" in capsys.readouterr().err
    [row] = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert row["failed"] == row["samples"] == 2


def test_plans_side_by_side(source: Path, first: Path, tmp_path: Path) -> None:
    """From one prefill, in threads: the answers are the same, and so they are in caches that have more room."""
    model = herald_jax.load(source)
    tokens = eval_sets.token_counter(model)
    sets = [
        eval_sets.task_set(model, task, 500, 3, seed=0, haystack=None, chat=False, tokens=tokens)
        for task in ("single_needle", "fact_qa")
    ]
    plans = [Dense(), *(Mage(budget, min_budget=1, dense_layers=0, measure=True) for budget in (0.05, 1.0))]
    config = GenerateConfig(12, Threshold(0.9, steps=2))
    evaluate.run(model, plans, sets, config, tmp_path, settings={"checkpoint": ""}, workers=3)

    def answers(directory: Path) -> dict[Any, str]:
        found = map(json.loads, (directory / "answers.jsonl").read_text().splitlines()[1:])
        return {(r["plan"], r["set"], r["index"]): r["answer"] for r in found if "index" in r}

    assert answers(tmp_path) == answers(first)
    later = eval_sets.task_set(model, "fact_qa", 500, 2, seed=0, haystack=None, chat=False, first=1)
    shared, roomy = SharedPrefill(), dataclasses.replace(config, room=900)
    for sample in later.samples[:1] * 2:
        [text] = herald_jax.generate(model, [sample.ids], roomy, shared=shared).texts or []
        assert text == answers(first)["dense", "fact_qa/500", 1]
    with pytest.raises(GenerationError, match="for one batch of prompts, but these are others"):
        herald_jax.generate(model, [later.samples[1].ids], roomy, shared=shared)


def test_longbench_files(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = herald_jax.load(source)
    path = tmp_path / "qasper.jsonl"
    records = [
        {"input": "Who?", "context": "x" * 3000 + " end", "answers": ["Ada", "Ben"], "dataset": "qasper"},
        {
            "input": "Where?",
            "context": "short",
            "answers": ["Rome"],
            "dataset": "trec",
            "all_classes": ["Rome", "Oslo"],
        },
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    options = {"metric": None, "room": 64, "limit": None, "chat": False}
    sets = eval_sets.longbench_sets(path, model, template="{context} Q: {input} A:", **options)
    assert [(s.name, s.samples[0].metric) for s in sets] == [("qasper", "f1"), ("trec", "classification")]
    cut = sets[0].samples[0]
    assert len(cut.ids) == 1024 - 64
    assert model.tokenizer.decode(cut.ids).endswith("x end Q: Who? A:")
    assert model.tokenizer.decode(cut.ids).startswith("xxx")
    assert sets[1].samples[0].classes == ("Rome", "Oslo")
    for text, message in (
        ("[]", 'not an object with "input"'),
        ("{", "is not JSON"),
        ("", "holds no sample"),
        ('{"input": "", "context": "", "answers": []}', "no list of expected texts"),
        ('{"input": "", "context": "", "answers": ["a"], "dataset": "other"}', "data set 'other' has no metric"),
        ('{"input": "", "context": "", "answers": ["a"], "dataset": "trec"}', 'no list of class names.*"all_classes"'),
    ):
        path.write_text(text)
        with pytest.raises(GenerationError, match=message):
            eval_sets.longbench_sets(path, model, template="{context}{input}", **options)
    path.write_text(json.dumps(records[0]))
    for template in ("{question}", "{", "{context.end}", "{context[a]}", "{}"):
        with pytest.raises(GenerationError, match="template is wrong"):
            eval_sets.longbench_sets(path, model, template=template, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "needle"], "task is 'needle'"),
        (["--lengths", "1k"], "--lengths is '1k'"),
        (["--budgets", "0.1"], "--budgets goes with a plan that has a budget"),
        (["--plan", "mage", "--budgets", "x"], "neither a number of entries nor a fraction"),
        (["--samples", "0"], "--samples is 0"),
        (["--tasks", "all", "--data", "x.jsonl"], "not both"),
        (["--data", "absent.jsonl"], "absent.jsonl: No such file"),
        (["--replay", "-1"], "--replay is -1"),
        (["--tasks", "fact_qa,fact_qa", "--samples", "1"], "two sets of samples named fact_qa/1024"),
        (["--haystack", sys.executable], "is not UTF-8 text"),
        (["--data", "x.jsonl", "--template", os.devnull], "/dev/null names neither {context} nor {input}"),
        (["--no-chat", "--lengths", "2000", "--samples", "1"], "context is 1024 tokens"),
    ],
)
def test_bad_requests(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert evaluate.main([str(source), "--output", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_curve_without_matplotlib_is_refused_before_any_answer(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "out"
    assert evaluate.main([str(source), "--output", str(out), "--plan", "mage", "--budgets", "0.05,0.1"]) == 2
    assert "the curve of --budgets needs matplotlib; install herald-jax[plot]" in capsys.readouterr().err
    assert not out.exists()


def test_replay(source: Path) -> None:
    """The trajectory is what `generate` writes; a plan that selects everything agrees at every position."""
    model = herald_jax.load(source)
    prompt = model.tokenizer.encode("Question: what is the magic number of the lake? Answer:")
    config = GenerateConfig(max_new_tokens=10, policy=StaticLowConfidence(2))
    trajectory = replay.record(model, prompt, config)
    written = [token for _, final in trajectory.blocks for token in final.tolist()][len(prompt) % 4 :]
    assert written[:10] == herald_jax.generate(model, [prompt], config).tokens[0][:10]
    states = [state for block, _ in trajectory.blocks for state in block]
    assert all((state.revealed <= ~state.known).all() and state.revealed.any() for state in states)
    assert replay.replay(model, trajectory, Mage(budget=1.0, dense_layers=0)) == 1
    # From states in which a recorded token was exchanged for another, there is nothing to agree with there.
    other = dataclasses.replace(states[-1], predicted=(states[-1].predicted + 1) % 256)
    blocks = [*trajectory.blocks[:-1], ([*trajectory.blocks[-1][0][:-1], other], trajectory.blocks[-1][1])]
    agreement = replay.replay(model, replay.Trajectory(prompt, blocks), Mage(budget=1.0, dense_layers=0))
    total = sum(int(state.revealed.sum()) for state in states)
    assert agreement == pytest.approx(1 - int(other.revealed.sum()) / total)
    with pytest.raises(GenerationError, match="needs greedy decoding"):
        replay.record(model, [1, 2, 3], GenerateConfig(temperature=0.5))


def test_intervals() -> None:
    scores = [0.0, 1.0] * 50
    low, high = eval_report.interval(scores)
    assert 0.36 < low < 0.44  # 0.5 -/+ 1.96 * 0.05
    assert 0.56 < high < 0.64
    assert eval_report.interval(scores) == (low, high)
    assert eval_report.interval([1.0, 1.0]) == (1.0, 1.0)
    mean, low, high = eval_report.mean_of_groups([scores, [1.0] * 100])
    np.testing.assert_allclose(mean, 0.75)
    assert 0.68 < low < 0.72


def test_descriptions() -> None:
    assert eval_report.describe(Dense()) == "dense"
    assert eval_report.describe(Mage(measure=True)) == "mage budget=0.05"
    assert eval_report.describe(Mage(budget=512, selector="quest")) == "mage budget=512 selector=quest"
