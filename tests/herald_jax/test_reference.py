"""The model that the package carries: its files, and that it finds what is hidden in a text, under a sparse plan."""

from pathlib import Path

import pytest

import herald_jax
from convert.converter import convert
from herald_jax import GenerateConfig, Mage, demo, eval_sets

pytestmark = pytest.mark.once


def test_files() -> None:
    sizes = {path.name: path.stat().st_size for path in demo.REFERENCE.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= set(sizes)
    assert sum(sizes.values()) <= 32 << 20
    card = (demo.REFERENCE / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card
    assert "| single needle |" in card


def test_finds_needles(tmp_path: Path) -> None:
    """With 40 entries of some 400, per layer and head, at all steps but each block's first."""
    convert(demo.REFERENCE, tmp_path / "model")
    model = herald_jax.load(tmp_path / "model", dtype="float32")
    needles = eval_sets.task_set(model, "multi_key", 400, 4, seed=1, haystack=None, chat=False).samples
    plan = Mage(40, min_budget=0)
    result = herald_jax.generate(model, [needle.ids for needle in needles], GenerateConfig(max_new_tokens=16), plan)
    assert result.texts is not None
    found = [needle.expected[0] in text for needle, text in zip(needles, result.texts, strict=True)]
    assert sum(found) >= 3, result.texts
    assert result.stats.sparse_blocks > 0
