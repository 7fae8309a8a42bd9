"""The landed oracle values are what torch and transformers compute today (`make test-oracle`)."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.oracles import cases
from tests.oracles.cases import assert_as_landed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.oracle

DATA = pathlib.Path(__file__).parent / "data"
# The whole directory is carried by every clone.
MOST_BYTES = 6_000_000


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    """Many tiny matrices: a second thread only waits."""
    import torch

    torch.set_num_threads(1)


@functools.cache
def landed(file: str) -> Any:
    """A landed JSON file."""
    return json.loads((DATA / file).read_text())


@functools.cache
def model(name: str) -> PreTrainedModel:
    """A landed checkpoint, run by transformers."""
    from tests.oracles import zoo

    return zoo.load(name)


def test_size() -> None:
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < MOST_BYTES


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.iterdir() if path.is_dir()))
def test_checkpoint(name: str, tmp_path: pathlib.Path) -> None:
    """The script writes the landed directory: same files, same texts, same weights."""
    from tests.oracles import zoo

    zoo.write(name, zoo.build(zoo.ZOO[name]), tmp_path)
    assert_as_landed(tmp_path / name, DATA / name)


def test_logits() -> None:
    from tests.oracles import make

    recorded, live = np.load(DATA / "logits.npz"), make.record_logits()
    assert set(recorded.files) == live.keys()
    for key, value in live.items():
        np.testing.assert_allclose(recorded[key], value, rtol=0, atol=2e-5, err_msg=key)


def test_training_loss() -> None:
    """turbo-dllm's noise and labels over transformers' logits."""
    from tests.oracles import training

    recorded, live = np.load(DATA / "training.npz"), training.record()
    assert set(recorded.files) == live.keys()
    for key, value in live.items():
        np.testing.assert_allclose(recorded[key], value, rtol=1e-5, atol=0, err_msg=key)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_decode(case: cases.Case) -> None:
    """Tokens and number of passes of every row, decided as clearly as when they were landed."""
    from tests.oracles import make

    recorded = landed("decodes.json")["cases"][case.name]
    assert [len(row["prompt"]) for row in recorded["rows"]] == list(case.lengths)
    for row in recorded["rows"]:
        live = make.decode(model(case.model), case, row["prompt"], recorded["stops"])
        assert (live.tokens, live.passes) == (row["tokens"], row["passes"])
        assert min(live.margins.token, live.margins.reveal) > cases.MARGIN


@pytest.mark.parametrize("name", cases.CAUSAL)
def test_causal(name: str) -> None:
    from tests.oracles import make

    for row in landed("decodes.json")["causal"][name]:
        tokens, margin = make.causal_continuation(model(name), row["prompt"], cases.CAUSAL_NEW_TOKENS)
        assert tokens == row["tokens"]
        assert margin > cases.MARGIN


def test_small_pass_after_its_full_pass() -> None:
    """The restatement of the sub-block cache: with nothing revealed in between, it repeats the full pass."""
    from tests.oracles import samplers

    ids = cases.logits_ids("fast-dllm-v2")[:13] + [cases.MASK] * 3
    passes = samplers.SubBlockPass(model("fast-dllm-v2"), 8)
    full = passes.full(ids).numpy()
    np.testing.assert_allclose(full, samplers.full_logits(model("fast-dllm-v2"), ids, 8).numpy(), rtol=0, atol=2e-5)
    np.testing.assert_allclose(passes.small(ids, 12, 16).numpy(), full[12:], rtol=0, atol=2e-5)
    revealed = [*ids[:13], 7, *ids[14:]]
    stale, fresh = passes.small(revealed, 12, 16), samplers.full_logits(model("fast-dllm-v2"), revealed, 8)[12:]
    assert float((stale - fresh).abs().max()) > 0.1, "what is kept must differ from what a full pass would see"


def test_sub_block_cache_changes_tokens() -> None:
    """The cases with the sub-block cache would not pass without it."""
    import dataclasses

    from tests.oracles import make

    cached = [case for case in cases.CASES if case.block_cache and not case.name.endswith("long-cache")]
    assert len(cached) >= 4
    for case in cached:
        rows = landed("decodes.json")["cases"][case.name]["rows"][:12]
        without = dataclasses.replace(case, block_cache=False)
        stops = landed("decodes.json")["cases"][case.name]["stops"]
        live = [make.decode(model(case.model), without, row["prompt"], stops).tokens for row in rows]
        assert any(a != b["tokens"] for a, b in zip(live, rows, strict=True)), case.name


def test_smollm2() -> None:
    """Greedy continuations and logits of the real weights."""
    from tests.oracles import smollm2

    values, logits = smollm2.record()
    expected = landed("smollm2.json")
    for row, kept in zip(values["rows"], expected["rows"], strict=True):
        assert row.pop("margin") == pytest.approx(kept["margin"], abs=1e-3)
        assert row == {key: value for key, value in kept.items() if key != "margin"}
    np.testing.assert_allclose(np.load(DATA / "smollm2_logits.npz")["logits"], logits["logits"], rtol=0, atol=2e-4)
