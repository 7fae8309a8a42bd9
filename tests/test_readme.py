"""README and docs tell the truth: their commands run, their links lead somewhere, their table is current."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import readme_table

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CHECKPOINT = ROOT / "tests" / "oracles" / "data" / "sdar"  # tiny, random, in the form SDAR is published in


def fenced(language: str) -> list[str]:
    """The code blocks of a language in all pages, in order."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line for block in fenced("bash") for line in block.splitlines() if line]


def test_only_languages_that_are_tested() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"^```(\w+)$", text, flags=re.MULTILINE)) <= {"bash", "python"}


def test_make_targets_exist() -> None:
    """`.ci/run` runs them whole; here make only says what it would do."""
    targets = [line.split()[1] for line in commands() if line.startswith("make ")]
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        done = subprocess.run(
            ["make", "-n", target, f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_extras_of_pip_commands_exist() -> None:
    pip = [line for line in commands() if line.startswith("pip ")]
    extras = {extra for line in pip for group in re.findall(r"\[([\w,]+)\]", line) for extra in group.split(",")}
    assert extras
    assert extras <= set(PROJECT["project"]["optional-dependencies"])


def test_console_commands_lead_to_functions() -> None:
    scripts = PROJECT["project"]["scripts"]
    assert set(scripts) == {"herald-convert", "herald-generate", "herald-eval", "herald-finetune"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(import_module(module), function))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder in which the pages' commands have what they name, and the environment they run in."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(CHECKPOINT, folder / "SDAR-8B-Chat")
    (folder / "questions.txt").write_text("What is a block?\nAnd a mask?\nWhy?\n")
    scripts = folder / "bin"
    scripts.mkdir()
    for name, target in PROJECT["project"]["scripts"].items():
        shim = scripts / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -W error -m {target.partition(":")[0]} "$@"\n')
        shim.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
    }
    return folder, environment


@pytest.mark.once
@pytest.mark.slow
def test_commands_and_python_run(workspace: tuple[Path, dict[str, str]]) -> None:
    """All of them in the order a reader meets them, since later ones use what earlier ones made."""
    folder, environment = workspace
    lines = [line for line in commands() if not line.startswith(("make ", "pip "))]
    assert all("herald-" in line for line in lines), "a command of a kind that no test knows"
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(lines)],
        cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert "tokens per forward" in done.stderr
    for block in fenced("python"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", block],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_architecture_names_every_source_file() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:[\w/]*/)?(\w+\.py)`", text))
    there = {path.name for package in ("herald_jax", "convert") for path in (ROOT / package).glob("*.py")}
    assert named - {"test_layout.py"} == there - {"__init__.py"}


# --- the table of results -----------------------------------------------------------------------------------------


def test_table_is_current() -> None:
    assert readme_table.main(["--check"]) == 0, "run python -m benchmarks.readme_table"


def test_table_shows_goals_missed_as_well_as_met(tmp_path: Path) -> None:
    rows = [
        {"id": "a/fast", "value": 1.5, "unit": "x", "goal": ">=1.4", "met": True},
        {"id": "a/slow", "value": 1.25, "unit": "x", "goal": ">=1.4", "met": False, "commit": "f" * 40},
        {"id": "a/other", "value": 3.0, "unit": "ms"},
    ]
    report = {"benchmark": "a", "device": "NVIDIA H200", "commit": "0123456789abcdef", "date": "2", "rows": rows}
    (tmp_path / "a-h200.json").write_text(json.dumps(report))
    (tmp_path / "b-cpu.json").write_text(json.dumps({**report, "device": "cpu", "rows": rows[2:]}))
    assert readme_table.table(tmp_path).splitlines() == [
        "| measured | value | goal | | device | commit |",
        "|---|---:|---|---|---|---|",
        "| `a/fast` | 1.5 x | >=1.4 x | met | NVIDIA H200 | 01234567 |",
        "| `a/slow` | 1.25 x | >=1.4 x | **missed** | NVIDIA H200 | ffffffff |",
        "| `a/other` | 3 ms |  |  | cpu | 01234567 |",
        "",
        "Rows without a goal: 1 in [a-h200.json](benchmarks/results/a-h200.json).",
    ]


def test_of_rows_that_two_benchmarks_measure_the_newer_is_shown(tmp_path: Path) -> None:
    row = {"id": "a/fast", "value": 1.5, "unit": "x", "goal": ">=1.4", "met": True}
    report = {"benchmark": "a", "device": "cpu", "commit": "a" * 40, "date": "2", "rows": [row]}
    (tmp_path / "a-cpu.json").write_text(json.dumps(report))
    older = [{**row, "value": 1.25, "date": "1"}, {**row, "id": "b/more"}]
    (tmp_path / "b-cpu.json").write_text(json.dumps({**report, "date": "3", "rows": older}))
    shown = [line.split("|")[1:3] for line in readme_table.table(tmp_path).splitlines()[2:]]
    assert shown == [[" `a/fast` ", " 1.5 x "], [" `b/more` ", " 1.5 x "]]


def test_table_without_results(tmp_path: Path) -> None:
    text = f"before\n{readme_table.BEGIN}\nold\n{readme_table.END}\nafter\n"
    assert readme_table.render(text, tmp_path) == text.replace("old", "No results yet.")
    with pytest.raises(ValueError, match="markers"):
        readme_table.render("no markers", tmp_path)
