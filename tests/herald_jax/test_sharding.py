"""Spread over four virtual devices: the same tokens as on one, every part where the table says, refusals."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from herald_jax import (
    ConfigError,
    GenerateConfig,
    GenerationError,
    Herald,
    Model,
    Threshold,
    generate,
    make_mesh,
    stream,
)
from herald_jax.config import ModelConfig
from herald_jax.model import flatten, init_params, param_specs
from herald_jax.sharding import loading_sharding, normalise_mesh, param_sharding, replication
from tests.herald_jax import tiny

# Four KV heads: two or four devices hold whole heads.
WIDE = {
    "sdar": dataclasses.replace(tiny.SDAR, num_heads=8, num_kv_heads=4),
    "fast_dllm": dataclasses.replace(tiny.FAST_DLLM, num_heads=12, num_kv_heads=4),
    "llama": dataclasses.replace(tiny.LLAMA, num_heads=4, num_kv_heads=4),
    # Fewer KV heads than devices; a vocabulary that no mesh divides.
    "sdar-2-heads": dataclasses.replace(tiny.SDAR, num_heads=8, num_kv_heads=2, tie_word_embeddings=True),
    "fast_dllm-1-head": dataclasses.replace(
        tiny.FAST_DLLM, num_heads=4, num_kv_heads=1, tie_word_embeddings=False, vocab_size=97
    ),
}
REQUESTS = {
    "greedy": GenerateConfig(11, Threshold(0.4)),
    "sampled": GenerateConfig(11, Threshold(0.4), temperature=0.9, top_k=40, top_p=0.9, seed=5),
    "cached": GenerateConfig(11, Threshold(0.3), block_cache=True),
}
PROMPTS = tiny.prompts([1, 4, 7, 9, 14], seed=2)  # five rows: padded to six where "data" is two


@functools.cache
def alone(form: str, request: str) -> list[list[int]]:
    return generate(tiny.model(WIDE[form]), PROMPTS, REQUESTS[request]).tokens


@pytest.mark.parametrize(
    ("form", "request_name", "shape"),
    [
        ("sdar", "sampled", {"model": 2}),
        pytest.param("sdar", "sampled", {"data": 2, "model": 2}, marks=pytest.mark.once),
        ("fast_dllm", "greedy", {"model": 4}),
        ("fast_dllm", "cached", {"data": 2, "model": 2}),
        ("llama", "greedy", {"data": 2}),
        pytest.param("llama", "sampled", {"model": 4}, marks=pytest.mark.once),
        ("sdar-2-heads", "greedy", {"model": 4}),
        pytest.param("fast_dllm-1-head", "sampled", {"data": 2, "model": 2}, marks=pytest.mark.once),
    ],
    ids=str,
)
def test_sharded_equals_unsharded(form: str, request_name: str, shape: dict[str, int]) -> None:
    mesh = make_mesh(**shape)
    model = Model.from_params(WIDE[form], tiny.params(WIDE[form]), mesh=mesh)
    result = generate(model, PROMPTS, REQUESTS[request_name])
    assert result.tokens == alone(form, request_name)
    assert result.stats.rows == len(PROMPTS)
    *events, stats = list(stream(model, PROMPTS, REQUESTS[request_name]))
    for row, tokens in enumerate(result.tokens):
        assert [token for event in events if event.row == row for token in event.tokens] == tokens  # type: ignore[union-attr]
    assert (stats.forwards, stats.blocks) == (result.stats.forwards, result.stats.blocks)  # type: ignore[union-attr]


def test_the_requests_differ() -> None:
    assert alone("sdar", "greedy") != alone("sdar", "sampled")
    assert len({token for row in alone("fast_dllm", "greedy") for token in row}) > 8


def test_parameters_lie_where_the_table_says() -> None:
    model = Model.from_params(WIDE["sdar"], tiny.params(WIDE["sdar"]), mesh=make_mesh(data=2, model=2))
    local = {path: leaf.addressable_shards[0].data.shape for path, leaf in flatten(model.params).items()}
    assert local["embed/embedding"] == local["head/kernel"] == (48, 32)
    assert local["layers/0/attn/qkv/kernel"] == (32, 2, 4, 16)
    assert local["layers/1/attn/out/kernel"] == (2, 2, 16, 32)
    assert local["layers/0/mlp/gate_up/kernel"] == (32, 2, 24)
    assert local["layers/0/mlp/down/kernel"] == (24, 32)
    assert local["layers/0/attn_norm/scale"] == local["norm/scale"] == (32,)
    for path, leaf in flatten(model.params).items():
        whole = flatten(tiny.params(WIDE["sdar"]))[path]
        assert len(leaf.addressable_shards) == 4
        for shard in leaf.addressable_shards:
            assert (np.asarray(shard.data) == whole[shard.index]).all()


def test_few_kv_heads_are_held_several_times() -> None:
    """Every device has one KV head and its share of the query heads; two heads have become four."""
    config = WIDE["sdar-2-heads"]
    # Parameters already placed on one device are moved, not refused.
    model = Model.from_params(config, tiny.model(config).params, mesh=make_mesh(model=4))
    assert (model.config.num_kv_heads, model.config.num_heads, model.config.group_size) == (4, 8, 2)
    whole = tiny.params(config)["layers"]["0"]["attn"]
    qkv, out = (model.params["layers"]["0"]["attn"][name]["kernel"] for name in ("qkv", "out"))
    assert {shard.data.shape for shard in qkv.addressable_shards} == {(32, 1, 4, 16)}
    for copy in range(4):
        head, queries = copy // 2, slice(copy % 2 * 2, copy % 2 * 2 + 2)
        assert (np.asarray(qkv[:, copy, :2]) == whole["qkv"]["kernel"][:, head, :4][:, queries]).all()
        assert (np.asarray(qkv[:, copy, 2:]) == whole["qkv"]["kernel"][:, head, 4:]).all()
        assert (np.asarray(out[copy]) == whole["out"]["kernel"][head, queries]).all()


def test_biases_are_replicated_with_their_heads() -> None:
    config = dataclasses.replace(tiny.FAST_DLLM, num_heads=8, out_bias=True)
    model = Model.from_params(config, tiny.params(config), mesh=make_mesh(model=4))
    whole = tiny.params(config)["layers"]["1"]["attn"]["qkv"]["bias"]
    bias = np.asarray(model.params["layers"]["1"]["attn"]["qkv"]["bias"])
    assert bias.shape == (4, 4, 16)
    assert (bias[:, 2:] == np.repeat(whole[:, 4:], 2, axis=0)).all()
    assert (bias[:, :2].reshape(2, 4, 16) == whole[:, :4]).all()


@pytest.mark.parametrize(
    ("changes", "devices", "sentence"),
    [
        (
            {"num_heads": 6, "num_kv_heads": 2},
            4,
            "2 KV heads with 3 query heads each cannot be spread over 4 devices of the 'model' axis; use a number of "
            "devices that divides 2, or 2 times a divisor of 3",
        ),
        ({"num_heads": 6, "num_kv_heads": 3}, 2, "3 KV heads with 2 query heads each cannot be spread over 2 devices"),
        (
            {"intermediate_size": 50, "num_kv_heads": 4},
            4,
            "axis 'mlp' of size 50 cannot be split over the 4 devices of mesh axis 'model'; use a number of devices",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused(changes: dict[str, int], devices: int, sentence: str) -> None:
    config = dataclasses.replace(tiny.SDAR, **changes)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        Model.from_params(config, init_params(config, jax.random.key(0)), mesh=make_mesh(model=devices))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "copies"),
    [(8, 4, 1, 1), (8, 4, 2, 1), (8, 4, 4, 1), (8, 2, 4, 2), (4, 1, 4, 4), (4, 1, 2, 2), (6, 1, 3, 3)],
)
def test_replication(heads: int, kv_heads: int, devices: int, copies: int) -> None:
    config = dataclasses.replace(tiny.SDAR, num_heads=heads, num_kv_heads=kv_heads)
    assert replication(config, make_mesh(model=devices)) == copies
    assert replication(config, None) == 1


def test_meshes_of_every_make_are_normalised() -> None:
    devices = np.asarray(jax.devices()[:4])
    named = {
        "one axis": Mesh(devices, ("model",)),
        "explicit": Mesh(devices.reshape(2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2),
        "other order": Mesh(devices.reshape(2, 2), ("model", "data")),
        "jax.make_mesh": jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2),
    }
    meshes = {name: normalise_mesh(mesh) for name, mesh in named.items()}
    assert all(mesh.axis_names == ("data", "model") for mesh in meshes.values())
    assert all(set(mesh.axis_types) == {AxisType.Auto} for mesh in meshes.values())
    assert dict(meshes["one axis"].shape) == {"data": 1, "model": 4}
    assert dict(normalise_mesh(Mesh(devices, ("data",))).shape) == {"data": 4, "model": 1}
    assert (meshes["other order"].devices == devices.reshape(2, 2).T).all()
    assert (meshes["explicit"].devices == devices.reshape(2, 2)).all()
    assert hash(meshes["explicit"]) == hash(make_mesh(data=2, model=2))
    with pytest.raises(ConfigError, match="mesh axis 'tp' is unknown; name the axes 'data' and 'model'"):
        normalise_mesh(Mesh(devices, ("tp",)))


def test_a_mesh_of_the_user_runs() -> None:
    """One axis only, explicit: the programs see neither. (Equal to make_mesh(model=2), so nothing compiles for it.)"""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("model",), axis_types=(AxisType.Explicit,))
    model = Model.from_params(WIDE["sdar"], tiny.params(WIDE["sdar"]), mesh=mesh)
    assert generate(model, PROMPTS, REQUESTS["sampled"]).tokens == alone("sdar", "sampled")


def test_make_mesh_refuses() -> None:
    assert dict(make_mesh(data=2, model=2).shape) == {"data": 2, "model": 2}
    assert make_mesh(model=2, devices=jax.devices()[2:]).devices.tolist() == [jax.devices()[2:4]]
    with pytest.raises(ConfigError, match="a mesh of 2 x 4 needs 8 devices, but only 4 are there"):
        make_mesh(data=2, model=4)
    for shape in ({"model": 0}, {"data": -2, "model": -1}):
        with pytest.raises(ConfigError, match="is impossible; both numbers must be positive"):
            make_mesh(**shape)


def test_placement_of_odd_sizes() -> None:
    """An odd vocabulary is replicated; leaves to be replicated by heads are read split over another axis."""
    specs = param_specs(WIDE["fast_dllm-1-head"])
    mesh = make_mesh(model=4)
    assert param_sharding(specs["head/kernel"], mesh).spec == P(None, None)
    assert param_sharding(specs["layers/0/mlp/down/kernel"], mesh).spec == P("model", None)
    assert loading_sharding(specs["layers/0/attn/qkv/kernel"], mesh).spec == P("model", None, None, None)
    assert loading_sharding(specs["layers/0/attn/out/kernel"], mesh).spec == P(None, None, None, "model")
    assert loading_sharding(specs["layers/0/attn/qkv/bias"], mesh).spec == P(None, None, None)
    assert loading_sharding(specs["layers/0/attn/qkv/kernel"], None) == param_sharding(specs["head/kernel"], None)


def test_random_parameters_are_born_sharded() -> None:
    mesh = make_mesh(model=4)
    config: ModelConfig = WIDE["sdar"]
    born: dict[str, Any] = init_params(config, jax.random.key(0), sharding_for=lambda _, s: param_sharding(s, mesh))
    plain = flatten(init_params(config, jax.random.key(0)))
    for path, leaf in flatten(born).items():
        assert leaf.sharding.is_equivalent_to(param_sharding(param_specs(config)[path], mesh), leaf.ndim)
        assert (np.asarray(leaf) == np.asarray(plain[path])).all()


def test_herald_on_a_mesh_is_as_on_one_device() -> None:
    """Each device's heads (and rows) live, and are selected, gathered and appended, in memory of its own."""
    config = WIDE["sdar"]
    params = tiny.params(config)
    plan = Herald(0.3, min_budget=2, selector="split", split=0.5, page_size=2, keep_bonus=0.5)
    prompts = [*PROMPTS, *tiny.prompts([30], seed=3)]
    expected = generate(tiny.model(config), prompts, REQUESTS["greedy"], plan)
    mesh = make_mesh(data=2, model=2)
    sharded = Model.from_params(config, params, mesh=mesh)
    result = generate(sharded, prompts, REQUESTS["greedy"], plan)
    assert result.tokens == expected.tokens
    assert result.stats.sparse_blocks == expected.stats.sparse_blocks > 0
    assert result.stats.offload is not None
    assert expected.stats.offload is not None
    assert result.stats.offload.fetched_bytes == expected.stats.offload.fetched_bytes > 0
    with pytest.raises(GenerationError, match="measure is True, but each device of a mesh has a clock of its own"):
        generate(sharded, prompts, REQUESTS["greedy"], dataclasses.replace(plan, measure=True))
