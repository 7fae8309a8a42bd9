"""A file that appears whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from herald_jax import eval_report
from herald_jax.publish import whole_file


def test_a_file_is_replaced_when_it_is_written_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    # Of a process that was killed and had this one's number.
    (tmp_path / f".settings.json.{os.getpid()}.partial").write_text("half of it")
    for text in ("old", "new, with a \N{SNOWMAN}"):
        with whole_file(path) as out:
            out.write(text)
            out.flush()
            assert not path.exists() or path.read_text() == "old"
        assert path.read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == [path.name]


def test_an_exception_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.json"
    path.write_text("old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("herald_jax.publish.os.fsync", full)
    with pytest.raises(OSError, match="No space left"), whole_file(path) as out:
        out.write("new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == [path.name]
    with pytest.raises(OSError, match="No space left"):  # what herald-eval makes of its answers
        eval_report.write(tmp_path, {"rows": [], "means": []}, {"checkpoint": "model"})
    assert os.listdir(tmp_path) == [path.name]


def test_a_killed_process_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text("old")
    program = (
        "import os, pathlib, signal, sys\n"
        "from herald_jax.publish import whole_file\n"
        "with whole_file(pathlib.Path(sys.argv[1])) as out:\n"
        "    print('x' * 100_000, file=out, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(path)]).returncode == -signal.SIGKILL
    assert path.read_text() == "old"
