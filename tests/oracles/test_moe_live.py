"""The landed values of mixtures of experts are what transformers and diffusers compute today (`make test-oracle`)."""

from __future__ import annotations

import functools
import importlib.util
import json
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from convert.converter import convert
from convert.verify import verify
from tests.oracles import moe_cases
from tests.oracles.cases import assert_as_landed
from tests.oracles.moe_cases import DATA

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.oracle


@functools.cache
def model(name: str) -> PreTrainedModel:
    from tests.oracles import moe

    return moe.build(name)


@pytest.mark.parametrize("name", ["llada2", "sdar-moe"])
def test_checkpoint(name: str, tmp_path: pathlib.Path) -> None:
    """The script writes the landed directory, and `--verify` accepts its conversion."""
    from tests.oracles import moe

    moe.write(name, model(name), tmp_path)
    assert_as_landed(tmp_path / name, DATA / name)
    convert(DATA / name, tmp_path / "converted")
    assert verify(DATA / name, tmp_path / "converted").startswith("verified: logits of ")


def test_logits_and_routing() -> None:
    from tests.oracles import moe

    for file, live in (("logits.npz", moe.record_logits()), ("routing.npz", moe.record_routing())):
        recorded = np.load(DATA / file)
        assert set(recorded.files) == live.keys()
        for key, value in live.items():
            np.testing.assert_allclose(recorded[key], value, rtol=0, atol=2e-5, err_msg=key)


def test_sdar_decodes() -> None:
    from tests.oracles import moe

    assert moe.record_sdar() == json.loads((DATA / "sdar_decodes.json").read_text())


@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="needs diffusers 0.42 (make test-oracle)")
@pytest.mark.filterwarnings("ignore")  # of a package of many parts; only its one pipeline matters here
@pytest.mark.parametrize("case", moe_cases.CASES, ids=lambda case: case.name)
def test_decode(case: moe_cases.Case) -> None:
    """The pipeline's tokens, calls and edits for two rows of each case, decided as clearly as when they were landed."""
    from tests.oracles import moe

    recorded: dict[str, Any] = json.loads((DATA / "decodes.json").read_text())[case.name]
    assert [len(row["prompt"]) for row in recorded["rows"]] == list(case.lengths)
    for row in recorded["rows"][::5]:
        live = moe.decode(model("llada2"), case, row["prompt"], recorded["stop"])
        assert (live.tokens, live.calls, live.edited, live.cut_off) == (
            row["tokens"],
            row["calls"],
            row["edited"],
            row["cut_off"],
        )
        assert live.margin > moe_cases.MARGIN
