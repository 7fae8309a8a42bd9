"""What is compiled, and how often: compilations are counted, and the optimised program of the loop is read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from herald_jax import Dense, EntropyBound, GenerateConfig, Model, Threshold, generate, make_mesh, stream
from herald_jax.block_loop import run_blocks
from herald_jax.generate import _Run, capacity_for
from herald_jax.prefill import chunk_length
from tests.herald_jax import tiny

SAMPLED = GenerateConfig(16, Threshold(0.5), temperature=0.8, top_p=0.9, prefill_chunk=16)


class Compilations:
    """Names of the functions compiled since `clear()`, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, event: str, _: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.names.append(str(details.get("fun_name")))


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)


def of_the_model(names: list[str]) -> list[str]:
    return [name for name in names if any(part in name for part in ("prefill", "canvas", "run_blocks"))]


@pytest.mark.parametrize("mesh", [None, {"data": 2, "model": 2}], ids=["one device", "mesh"])
def test_what_does_not_compile_again(compilations: Compilations, mesh: dict[str, int] | None) -> None:
    """Three programs for a batch; then nothing, whatever lengths in the bucket, numbers and way of asking."""
    config = dataclasses.replace(tiny.SDAR, num_layers=1, max_position_embeddings=500 + bool(mesh))  # this test's own
    model = Model.from_params(config, tiny.params(config), mesh=None if mesh is None else make_mesh(**mesh))
    generate(model, tiny.prompts([9, 5]), SAMPLED)
    assert len(of_the_model(compilations.names)) == 3, compilations.names
    changes: list[tuple[list[int], dict[str, Any]]] = [
        ([14, 3], {}),
        ([1, 2], {"max_new_tokens": 40}),
        ([60, 31], {"seed": 8, "max_new_tokens": 1}),  # four chunks of prefill
        ([9, 5], {"temperature": 1, "top_p": 0.2, "policy": Threshold(1)}),
        ([9, 5], {"temperature": 2.5, "ignore_stop": True}),
        ([9, 5], {"stop_token_ids": (3,), "policy": Threshold(0.25)}),
    ]
    changes.append(([2, 3], {}))  # no prefill at all
    compilations.names.clear()
    for lengths, fields in changes:
        generate(model, tiny.prompts(lengths), dataclasses.replace(SAMPLED, **fields))
        assert compilations.names == [], (lengths, fields)
    list(stream(model, tiny.prompts([9, 5]), SAMPLED))
    assert compilations.names == []
    keys = jax.random.split(jax.random.key(1), 2)
    compilations.names.clear()
    generate(model, tiny.prompts([9, 5]), SAMPLED, keys=keys)
    assert of_the_model(compilations.names) == []


def test_what_does_compile_again(compilations: Compilations) -> None:
    """The counter counts: another policy is another loop, another capacity three other programs."""
    config = dataclasses.replace(tiny.LLAMA, num_layers=1, max_position_embeddings=502)
    model = tiny.model(config)
    request = GenerateConfig(3)
    generate(model, tiny.prompts([9]), request)
    compilations.names.clear()
    generate(model, tiny.prompts([9]), dataclasses.replace(request, policy=EntropyBound(0.5)))
    assert len(of_the_model(compilations.names)) == 1
    compilations.names.clear()
    generate(model, tiny.prompts([140]), request)
    assert len(of_the_model(compilations.names)) == 3


def test_buckets() -> None:
    """Capacities hold what is asked, waste at most a quarter beyond the first 512, and are few."""
    sizes = range(1, 40_000)
    capacities = [capacity_for(needed) for needed in sizes]
    assert all(capacity >= needed for needed, capacity in zip(sizes, capacities, strict=True))
    assert all(c <= max(needed * 1.25, needed + 128) for needed, c in zip(sizes, capacities, strict=True))
    assert len(set(capacities)) < 45
    for block in (1, 4, 32, 48):
        for longest in (1, 15, 16, 17, 100, 1000, 5000):
            chunk = chunk_length(longest, 256, block)
            assert chunk % block == 0
            assert chunk >= min(longest, 256)
            assert chunk <= max(2 * longest, 16 + block, block) or chunk <= 256 + block
        assert len({chunk_length(longest, 256, block) for longest in range(1, 5000)}) <= 6


@pytest.mark.usefixtures("optimised")  # until the end of the module: this test is the last
@pytest.mark.parametrize(
    ("form", "block_cache", "batch"),
    [("sdar", False, 3), ("sdar", False, 1), pytest.param("fast_dllm", True, 3, marks=pytest.mark.once)],
    ids=["rows", "one row", "sub-block cache"],
)
def test_the_loop_updates_the_cache_in_place(form: str, block_cache: bool, batch: int) -> None:
    """The donated cache is the result's own memory, and no instruction of the optimised program copies it whole.

    (XLA's fallback attention does slice a layer out of the cache; the claim is about the cache, not about that slice.)
    """
    model = tiny.model(tiny.FORMS[form])
    request = GenerateConfig(24, Threshold(0.5), block_cache=block_cache)
    run = _Run(model, tiny.prompts([9, 5, 12][:batch]), request, Dense(), None, None)
    arguments = (model.params, run._rows, request.policy, run._sampling, run._stops, np.bool_(False))
    cache = run._rows.cache
    compiled = run_blocks.lower(*arguments, options=run._options).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= cache.k.nbytes + cache.v.nbytes
    text = compiled.as_text()
    assert text is not None
    shape = re.escape(f"f32[{','.join(map(str, cache.k.shape))}]")
    writes = re.findall(rf"= {shape}\S* (\S+?)\(", text)
    assert len(writes) > 4  # the text is read rightly: parameters, loop states and updates have that shape
    assert "copy" not in writes
    assert not [name for name in writes if name.startswith(("copy", "transpose", "concatenate", "pad", "convert"))]
