"""Test session set-up: strict JAX settings and four virtual CPU devices, before any backend starts."""

import importlib.util
import os
import shutil

# Read by JAX when it is first imported; also inherited by the command-line tests' subprocesses.
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest

# A shape that broadcasts by accident is a bug. There is no persistent compilation cache here: tests that count
# compilations need each to be a real one.
jax.config.update("jax_numpy_rank_promotion", os.environ["JAX_NUMPY_RANK_PROMOTION"])
jax.config.update("jax_num_cpu_devices", int(os.environ["JAX_NUM_CPU_DEVICES"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, and says what is missing."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    has_gpu = shutil.which("nvidia-smi") is not None
    for item in items:
        if item.get_closest_marker("oracle") and missing:
            item.add_marker(pytest.mark.skip(reason=f"needs {' and '.join(missing)} (make test-oracle)"))
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
