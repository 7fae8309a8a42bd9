"""A training run as a whole: it resumes on the same trajectory, on any number of devices, and as a command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import herald_jax
from herald_jax import finetune, finetune_step, lora, sharding, training
from herald_jax.checkpoint import save_checkpoint
from herald_jax.config import ModelConfig
from herald_jax.errors import CheckpointError, ConfigError, GenerationError
from herald_jax.model import flatten
from herald_jax.text import load_tokenizer
from herald_jax.train_data import Rows, TextRows
from tests import tiny as checkpoint
from tests.herald_jax import tiny

CONFIG: ModelConfig = dataclasses.replace(tiny.SDAR, num_layers=1)
OPTIMIZER = training.Optimizer(weight_decay=0.1)


class Random:
    """Rows of random tokens, of which all may become holes."""

    def rows(self, step: int) -> Rows:
        rng = np.random.default_rng(step)
        tokens = rng.integers(0, tiny.MASK, (4, 16)).astype(np.int32)
        at = np.sort(rng.integers(0, 4, (4, 3)), axis=1).astype(np.int32)
        return Rows(tokens, np.ones((4, 16), bool), at)


def run(steps: int, state: training.TrainState, step: Any, **options: Any) -> training.TrainState:
    return finetune_step.train(step, state, Random(), steps=steps, rate=lambda n: 1e-2, **options)[0]


def leaves(state: training.TrainState) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in flatten(state.trained).items()}


def test_resuming_and_spreading_change_nothing(tmp_path: Path) -> None:
    """Three steps at once; two, a restart, and one more; the same on four devices."""
    make = finetune_step.make_finetune_step(CONFIG, OPTIMIZER, finetune_step.LossOptions(remat=False))
    start = training.master(tiny.params(CONFIG))
    whole = leaves(run(3, training.init_state(start, OPTIMIZER), make))
    assert any((whole[p] != np.asarray(leaf)).any() for p, leaf in flatten(start).items())

    run(2, training.init_state(start, OPTIMIZER), make, directory=tmp_path / "state", save_every=1)
    restored = training.restore_state(tmp_path / "state", training.init_state(start, OPTIMIZER))
    assert restored is not None
    assert int(restored.step) == 2
    resumed = leaves(run(3, restored, make))
    for path, leaf in whole.items():
        np.testing.assert_array_equal(resumed[path], leaf, err_msg=path)

    mesh = sharding.normalise_mesh(sharding.make_mesh(data=2, model=2))
    spread = run(3, training.init_state(training.master(start, mesh, CONFIG), OPTIMIZER, mesh), make, mesh=mesh)
    for path, leaf in whole.items():
        np.testing.assert_allclose(leaves(spread)[path], leaf, atol=2e-3, err_msg=path)
    with pytest.raises(ConfigError, match="4 sequences cannot be split over 3 devices"):
        training.place_batch({"x": np.zeros((4, 2))}, sharding.normalise_mesh(sharding.make_mesh(data=3)))


@pytest.mark.parametrize(
    ("bad", "steps", "ends"),
    [
        ([2, 3, 5], 6, None),
        ([0, 1, 2], 3, "no step from 1 to 3 had finite"),  # all
        (range(4, 40), 40, f"no step from 5 to {4 + finetune_step.MOST_SKIPPED} had finite"),
    ],
    ids=["some", "all", "for ever"],
)
def test_steps_without_finite_gradients(
    bad: Any, steps: int, ends: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def step(state: Any, rows: Any, rate: Any) -> Any:
        norm = np.float32(np.nan if int(state.step) in bad else 1.0)
        return dataclasses.replace(state, step=state.step + 1), {"loss": norm, "grad_norm": norm}

    state: Any = training.TrainState(np.int32(0), {}, {})  # type: ignore[arg-type]
    if ends is None:
        assert int(run(steps, state, step).step) == steps
        assert f"{len(bad)} of {steps} steps had gradients that are not finite" in capsys.readouterr().err
    else:
        with pytest.raises(GenerationError, match=ends):
            run(steps, state, step, directory=tmp_path / "state", save_every=100)
        assert not (tmp_path / "state").exists()  # or the next run would take it for a finished one


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    plain = training.Optimizer()
    adapters = lora.init_adapters(CONFIG, 2, jax.random.key(0))
    training.save_state(tmp_path / "state", training.init_state(adapters, plain))
    with pytest.raises(CheckpointError, match="another model or optimizer"):
        training.restore_state(tmp_path / "state", training.init_state(tiny.params(CONFIG), plain))
    assert training.restore_state(tmp_path / "nothing", training.init_state(adapters, plain)) is None


def test_learning_rate() -> None:
    rates = [training.warmup_cosine(n, 100, peak=1.0, warmup=10) for n in (0, 9, 10, 55, 99)]
    np.testing.assert_allclose(rates, [0.1, 1.0, 1.0, 0.55, 0.1], atol=5e-3)
    assert training.warmup_cosine(100, 100, peak=1.0, warmup=10, floor=0.0) == 0.0


@pytest.mark.once
def test_command_trains_adapters_for_mage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`herald-finetune` on a tiny checkpoint: the result loads, differs where adapters are, and a rerun continues."""
    source = checkpoint.save(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{n} plus one is", "answer": f" {n + 1}."}) for n in range(30)))
    arguments = [
        str(source), str(tmp_path / "tuned"), "--data", str(data), "--length", "64,32", "--batch-size", "2",
        "--lora", "2", "--plan", "mage", "--budget", "8", "--min-budget", "1", "--dense-layers", "1", "--copies", "4",
        "--learning-rate", "0.05", "--warmup", "1", "--final-rate", "0", "--optimizer", "muon", "--no-remat",
        "--exact", "0.5", "--canvas", "first",
        "--curve", str(tmp_path / "curve.png"),
    ]  # fmt: skip
    assert finetune.main([*arguments, "--steps", "2"]) == 0
    printed = capsys.readouterr().err
    assert "frozen weights" in printed
    assert "loss" in printed
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    before, after = herald_jax.load(source), herald_jax.load(tmp_path / "tuned")
    changed = {p for p, leaf in flatten(after.params).items() if (leaf != flatten(before.params)[p]).any()}
    assert changed == set(lora.init_adapters(before.config, 2, jax.random.key(0)))
    assert after.tokenizer.encode("x") == before.tokenizer.encode("x")

    assert finetune.main([*arguments, "--steps", "3"]) == 2
    assert "already holds a checkpoint" in capsys.readouterr().err
    assert finetune.main([*arguments, "--steps", "2", "--force"]) == 0
    assert "continuing from step 2" in capsys.readouterr().err
    # What says which run the states are of may have been cut short, and is neither trusted nor overwritten then.
    settings = tmp_path / "tuned.state" / "settings.json"
    whole = settings.read_bytes()
    assert not list(settings.parent.glob(".*"))
    for damaged in (b"", whole[:-9], b"[]\n", b"\xff" + whole):
        settings.write_bytes(damaged)
        assert finetune.main([*arguments, "--steps", "2", "--force"]) == 2
        said = capsys.readouterr().err
        assert f"error: {settings} is damaged (" in said
        assert f"remove {settings.parent} to begin anew, or that file alone to go on" in said
        assert settings.read_bytes() == damaged
    settings.write_bytes(whole)
    # The states of another run are not gone on from, whether the flags or the data are others.
    assert finetune.main([*arguments, "--steps", "2", "--force", "--learning-rate", "0.01"]) == 2
    assert "is of a run with another learning_rate; give another output" in capsys.readouterr().err
    data.write_text(json.dumps({"prompt": "three plus one is", "answer": " 4."}))
    assert finetune.main([*arguments, "--steps", "2", "--force"]) == 2
    assert f"is of a run with another content of {data}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --data or --tasks"),
        (["--tasks", "needle"], "task is 'needle', but must be one of single_needle"),
        (["--tasks", "all", "--length", "512,30"], "must be a multiple of the block length 4"),
        (["--tasks", "all", "--length", "1k"], "--length is 1k, but must be a multiple"),
        (["--tasks", "all", "--steps", "0"], "--steps is 0"),
        (["--tasks", "all", "--final-rate", "1.5"], "--final-rate is 1.5, but must be a share of the rate"),
        (["--data", "absent.txt"], "absent.txt: No such file"),
        (["--tasks", "all", "--copies", "0"], "--copies is 0, but must be at least 1"),
        (["--tasks", "all", "--warmup", "-1"], "--warmup is -1, but must be at least 0"),
        (["--tasks", "all", "--full", "2"], "--full is 2.0, but must be a share of the blocks"),
        (["--tasks", "all", "--learning-rate", "0"], "--learning-rate is 0.0, but must be a positive number"),
        (["--tasks", "all", "--learning-rate", "1e300"], "--learning-rate is 1e+300, but must be a positive number"),
        (["--tasks", "all", "--seed", str(2**63)], f"--seed is {2**63}, but must be an integer of 64 bits"),
        (["--tasks", "all", "--curve", "loss.foo"], "a curve cannot be drawn as loss.foo; let its name end in .png"),
        (["--tasks", "all", "--curve", "absent/x.png"], "a file, but there is no directory absent"),
        (["--tasks", "all", "--curve", "."], "a file, but . is a directory"),
        (["--tasks", "all", "--plan", "mage", "--kl", "inf"], "KL is inf, but must be 0 or positive, and finite"),
        (["--tasks", "all", "--plan", "mage", "--exact", "nan"], "exact pass is nan, but must be 0 or positive"),
        (["--tasks", "all", "--plan", "mage", "--dense-layers", "2"], "dense_layers is 2, but the model has 2 layers"),
        (["--tasks", "all", "--length", "64"], "rows of 64 tokens end before the answers"),
        (["--tasks", "all", "--plan", "mage", "--selector", "quest"], "goes with selector 'mage'"),
    ],
)
def test_bad_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    source = checkpoint.save(tmp_path / "model")
    arguments = arguments if "--length" in arguments else [*arguments, "--length", "512"]
    assert finetune.main([str(source), str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_causal_model_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = Path(f"{checkpoint.save(tmp_path / 'model')}-tokenizer")
    config = dataclasses.replace(tiny.LLAMA, vocab_size=264)
    save_checkpoint(tmp_path / "causal", config, tiny.params(config), tokenizer_dir=files)
    arguments = [str(tmp_path / "causal"), str(tmp_path / "out"), "--tasks", "all", "--length", "512"]
    assert finetune.main(arguments) == 2
    assert "the model has no mask token" in capsys.readouterr().err
    assert not (tmp_path / "out.state").exists()


def test_a_device_without_room_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 3 bytes.")

    monkeypatch.setattr(finetune, "train", full)
    source, data = checkpoint.save(tmp_path / "model"), tmp_path / "text.txt"
    data.write_text("One and one and one. " * 20)
    arguments = [str(source), str(tmp_path / "out"), "--data", str(data), "--length", "64"]
    assert finetune.main(arguments) == 2
    assert "ran out of memory; lower --batch-size" in capsys.readouterr().err


def test_text_rows(tmp_path: Path) -> None:
    """Answers are learned and prompts are not; long texts are cut at blocks; the same step is the same rows."""
    encode = load_tokenizer(Path(f"{checkpoint.save(tmp_path / 'model')}-tokenizer")).encode
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "abc", "answer": "defg"}\n{"text": "' + "x" * 100 + '"}\n')
    source = TextRows(path, length=64, batch=8, copies=3, encode=encode, block=4, end=258, seed=0)
    rows = source.rows(5)
    np.testing.assert_array_equal(rows.tokens, source.rows(5).tokens)
    assert (rows.tokens != source.rows(6).tokens).any()
    x, given = encode("x")[0], set(encode("abc"))
    assert not rows.maskable[np.isin(rows.tokens, list(given))].any()
    assert rows.maskable[rows.tokens == x].all()
    assert (np.diff(rows.at, axis=1) >= 0).all()
    blocks = rows.maskable.reshape(8, 16, 4).any(axis=2)
    assert np.take_along_axis(blocks, rows.at, axis=1).all()
    for text, message in (("{", "not JSON"), ('{"x": 1}', 'no.*"text"|"text"'), ("", "nothing to train on")):
        path.write_text(text)
        with pytest.raises(GenerationError, match=message):
            TextRows(path, length=64, batch=1, copies=1, encode=encode, block=4, end=258, seed=0)
