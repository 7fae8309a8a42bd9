"""The demo's commands; `.ci/run` runs them for real (`make demo`)."""

import importlib.util
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from herald_jax import demo
from tests.data_packages import smollm2_gguf


@pytest.fixture(autouse=True)
def _without_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whether the package carries the reference model is each test's own choice."""
    monkeypatch.setattr(demo, "REFERENCE", tmp_path / "absent")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the demo would run, from the module's name on; everything succeeds."""
    called: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        called.append(command[2:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    return called


def test_converts_then_answers(commands: list[list[str]], tmp_path: Path) -> None:
    assert demo.main(["--directory", str(tmp_path)]) == 0
    model = str(tmp_path / "smollm2-135m")
    assert commands[0] == ["convert", str(smollm2_gguf()), model, "--dtype", "float32"]
    assert [command[:3] for command in commands[1:]] == [["herald_jax.cli", model, prompt] for prompt in demo.PROMPTS]


def test_reference_model_is_asked_first(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smollm2_gguf()
    monkeypatch.setattr(demo, "REFERENCE", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert demo.main(["--directory", str(tmp_path / "models")]) == 0
    model = str(tmp_path / "models" / "reference")
    assert commands[0] == ["convert", str(tmp_path), model, "--dtype", "float32"]
    assert [command[:2] for command in commands[1:3]] == [["herald_jax.cli", model]] * 2
    assert "mage" in commands[2]
    assert len(commands) == 3 + 1 + 2
    questions = (tmp_path / "models" / "questions.txt").read_text().splitlines()
    assert len(questions) == 3
    assert all(line.endswith(" Answer:") and 5000 < len(line) < 7000 for line in questions)
    assert capsys.readouterr().out.count("(expected: ") == 3


def test_second_run_does_not_convert_again(commands: list[list[str]], tmp_path: Path) -> None:
    smollm2_gguf()
    (tmp_path / "smollm2-135m").mkdir()
    assert demo.main(["--directory", str(tmp_path)]) == 0
    assert {command[0] for command in commands} == {"herald_jax.cli"}


def test_stops_at_the_first_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smollm2_gguf()
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: calls.append(a) or SimpleNamespace(returncode=3))
    assert demo.main(["--directory", str(tmp_path)]) == 3
    assert len(calls) == 1


def test_missing_weights_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert demo.main([]) == 2
    assert "run `make demo`" in capsys.readouterr().err
