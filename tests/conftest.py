"""Test session set-up: strict JAX settings and four virtual CPU devices, before any backend starts."""

import gc
import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

# Read by JAX when it is first imported; also inherited by the command-line tests' subprocesses.
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nearly all of the tests' time is XLA's, and most tests are of what is computed, not of how: without most optimisations
# they take half as long. On a GPU machine programs are compiled as they are used.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1" if shutil.which("nvidia-smi") is None else "0")

import jax
import pytest

# A shell has what it puts in the background ignore interrupts, and so would the children of the tests about them.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HAS_GPU = shutil.which("nvidia-smi") is not None

# A shape that broadcasts by accident is a bug. There is no persistent compilation cache here: tests that count
# compilations need each to be a real one, and few programs occur twice: from an empty folder it saves nothing.
jax.config.update("jax_numpy_rank_promotion", os.environ["JAX_NUMPY_RANK_PROMOTION"])
jax.config.update("jax_num_cpu_devices", int(os.environ["JAX_NUM_CPU_DEVICES"]))
jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1")


# A process may have 65,530 mappings of memory on Linux, a module of tests here makes up to 24,000 of compiled programs,
# and XLA crashes where it gets no more.
_MANY_MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def _room_for_programs() -> None:
    """Forget compiled programs, before a module of tests, if there are many."""
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def optimised() -> Iterator[None]:
    """Compile as users do, for tests of optimised programs: `pytestmark = pytest.mark.usefixtures("optimised")`."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # what an earlier module compiled otherwise
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, and says what is missing."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    for item in items:
        if item.get_closest_marker("oracle") and missing:
            item.add_marker(pytest.mark.skip(reason=f"needs {' and '.join(missing)} (make test-oracle)"))
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
