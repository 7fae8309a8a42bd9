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


def test_a_file_that_is_replaced_keeps_its_permissions_and_a_new_one_gets_the_usual_ones(tmp_path: Path) -> None:
    path, plain = tmp_path / "secret.json", tmp_path / "plain"
    plain.touch()
    for mode in (plain.stat().st_mode, 0o100600, 0o100664):
        if path.exists():
            path.chmod(mode)
        with whole_file(path) as out:
            out.write("new")
        assert path.stat().st_mode == mode


def test_of_a_link_the_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/file")  # which there is not, the first time
    for text in ("one", "two"):
        with whole_file(tmp_path / "link") as out:
            out.write(text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "there" / "file").read_text() == text
    assert os.listdir(tmp_path / "there") == ["file"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("directory", "Is a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("absent/file", "No such file or directory"),
        ("file/file", "Not a directory"),
    ],
)
def test_what_cannot_be_written_is_said_of_the_file_that_was_named_and_beforehand(
    tmp_path: Path, name: str, sentence: str
) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OSError, match=sentence) as refused, whole_file(tmp_path / name):
        pytest.fail("all was done for nothing")
    assert refused.value.filename == str(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == before


def test_what_may_not_be_written_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").touch(0o444)
    monkeypatch.setattr(os, "access", lambda path, mode: bool(path.stat().st_mode & 0o222))  # as for all but root
    with pytest.raises(PermissionError, match="kept"), whole_file(tmp_path / "kept"):
        pytest.fail("all was done for nothing")


def test_a_full_disk_is_said_of_the_file(tmp_path: Path) -> None:
    """While it is written, too: what the caller raises about other files stays as it is."""
    for given, name in ((OSError(28, "No space left on device"), "out"), (OSError(28, "No space", "other"), "other")):
        with pytest.raises(OSError, match="No space") as full, whole_file(tmp_path / "out"):
            raise given
        assert str(full.value.filename).endswith(name)
    with pytest.raises(BrokenPipeError) as piped, whole_file(tmp_path / "out"):
        raise BrokenPipeError(32, "Broken pipe")
    assert piped.value.filename is None
    assert os.listdir(tmp_path) == []
