"""The landed tokenizer values, recomputed live by transformers."""

import json

import pytest

from tests.herald_jax import text_oracle

pytestmark = pytest.mark.oracle


def test_landed_values_are_what_transformers_gives() -> None:
    assert json.loads(text_oracle.PATH.read_text(encoding="utf-8")) == text_oracle.compute_all()
