"""The flags of the plans, in every command that takes them: no field without one, and none under a wrong plan."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from herald_jax import cli_arguments, evaluate, finetune
from herald_jax.errors import GenerationError
from herald_jax.plans import Dense, Herald, Mage, Plan

# Of each plan, every field with a value that is not the default: in as many plans as can hold them together.
GIVEN: dict[type[Plan], list[dict[str, Any]]] = {
    Mage: [
        {
            "budget": 64, "min_budget": 8, "sinks": 4, "recent": 32, "query": "center", "reduce": "max",
            "normalise": "prefix", "dense_layers": 1, "select_at_step": 2, "rest": "keep", "page_size": 3,
            "measure": True,
        },
        {"allocate": "layer_adaptive", "layer_spread": 2.5, "select_every": 3},
        {"selector": "tidal", "reselect_layers": (2, 6)},
    ],
    Herald: [
        {
            "budget": 0.1, "min_budget": 8, "sinks": 4, "recent": 32, "query": "last", "reduce": "max",
            "dense_layers": 1, "page_size": 3, "draft_at": "auto", "selector": "split", "scan": "xla", "index_bits": 4,
            "split": 0.4, "keep_bonus": 0.25, "measure": True,
        },
        {"draft": False, "reuse": False},
    ],
}  # fmt: skip
CASES = [(plan, given) for plan, all_given in GIVEN.items() for given in all_given]


def _flags(plan: type[Plan], given: dict[str, Any]) -> list[str]:
    made = ["--plan", plan.__name__.lower()]
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            made.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            made += [f"--{flag}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return made


def _parse(flags: list[str]) -> argparse.Namespace:
    return cli_arguments.parser().parse_args(["model", *flags])


@pytest.mark.parametrize(("plan", "given"), CASES, ids=[f"{p.__name__}-{next(iter(g))}" for p, g in CASES])
def test_every_field_of_a_plan_has_a_flag_in_every_command(plan: type[Plan], given: dict[str, Any]) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(plan)}
    assert {name for each in GIVEN[plan] for name in each} == fields.keys()
    assert not any(value == fields[name] for name, value in given.items())
    flags = _flags(plan, given)
    for args in (
        _parse(flags),
        evaluate._parser().parse_args(["model", "--output", "out", *flags]),
        finetune._parser().parse_args(["model", "out", *flags]),
    ):
        assert cli_arguments.build_plan(args) == plan(**given)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--sinks", "4"], "--sinks belongs to --plan mage and herald, but the plan is dense"),
        (["--plan", "dense", "--select-every", "2"], "--select-every belongs to --plan mage, but the plan is dense"),
        (["--plan", "herald", "--allocate", "uniform"], "--allocate belongs to --plan mage, but the plan is herald"),
        (["--plan", "herald", "--layer-spread", "2"], "--layer-spread belongs to --plan mage, but the plan is herald"),
        (["--plan", "mage", "--draft-at", "0.5"], "--draft-at belongs to --plan herald, but the plan is mage"),
        (["--plan", "mage", "--layer-spread", "2"], "only with --allocate layer_adaptive: give that too"),
        (["--plan", "herald", "--split", "0.5"], "--split has a meaning only with --selector split: give that too"),
        (["--plan", "herald", "--selector", "index", "--split", "1"], "only with --selector split: give that too"),
        (
            ["--plan", "herald", "--index-bits", "4"],
            "--index-bits has a meaning only with --selector index or split or",
        ),
        (["--plan", "herald", "--selector", "cpu", "--index-bits", "8"], "only with --selector index or split or auto"),
        (["--plan", "herald", "--no-draft", "--selector", "index"], "--selector says who scores the draft's keys, but"),
        (
            ["--plan", "herald", "--selector", "index", "--scan", "xla"],
            "--scan has a meaning only with --selector cpu or split or auto: give that too",
        ),
        (["--plan", "herald", "--no-draft", "--scan", "xla"], "--scan says what scans for the draft, but --no-draft"),
        (["--plan", "herald", "--scan", "gpu"], "scan is 'gpu', but must be one of auto, native, xla"),
        (["--plan", "herald", "--no-draft", "--draft-at", "auto"], "--draft-at says when the draft is made, but"),
        (["--plan", "mage", "--normalise", "block"], "normalise is 'block', but must be one of prefix+block, prefix"),
        (["--plan", "mage", "--reselect-layers", "2"], "reselect_layers goes with selector 'tidal' only"),
        (["--plan", "herald", "--recent", "-1"], "recent is -1, but must be an integer of at least 0"),
    ],
)
def test_a_flag_of_another_plan_is_refused_with_the_plans_it_belongs_to(flags: list[str], sentence: str) -> None:
    with pytest.raises(GenerationError) as refused:
        cli_arguments.build_request(_parse(flags))
    assert sentence in str(refused.value)


def test_of_several_wrong_flags_the_first_is_named() -> None:
    """The same in every process, whatever its strings' hashes."""
    for flags in (["--recent", "4", "--budget", "8"], ["--budget", "8", "--recent", "4"]):
        with pytest.raises(GenerationError, match="--budget belongs to --plan mage and herald"):
            cli_arguments.build_plan(_parse(flags))


def test_no_list_of_layers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(["--plan", "mage", "--selector", "tidal", "--reselect-layers", "2;6"])
    assert "'2;6' is no list of layers, such as 2,6" in capsys.readouterr().err


@pytest.mark.parametrize(("plan", "given"), CASES, ids=[f"{p.__name__}-{next(iter(g))}" for p, g in CASES])
def test_settings_are_the_same_when_they_are_read_again(
    tmp_path: Path, plan: type[Plan], given: dict[str, Any]
) -> None:
    """Or a run would not go on where it stopped."""
    (tmp_path / "herald.json").write_text("{}")
    args = cli_arguments.parser().parse_args([str(tmp_path), *_flags(plan, given)])
    settings = cli_arguments.settings(args, (), [])
    assert given.keys() <= settings.keys()
    assert cli_arguments.differing(settings, json.loads(json.dumps(settings))) == []


def test_a_flag_that_is_the_default_all_the_same_may_stand_beside_what_it_is_for() -> None:
    flags = ["--plan", "herald", "--draft", "--draft-at", "0.5", "--selector", "auto", "--index-bits", "8"]
    assert cli_arguments.build_plan(_parse(flags)) == Herald(selector="auto")


def test_without_flags_the_plan_is_dense() -> None:
    assert cli_arguments.build_plan(_parse([])) == Dense()
