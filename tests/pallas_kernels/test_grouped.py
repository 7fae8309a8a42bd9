"""The grouped MLP: its plain form and, in JAX's interpreter of Mosaic GPU, its kernel against a loop over tokens."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels import dispatch, grouped, grouped_layout, grouped_rows, lanes_numpy
from pallas_kernels.grouped import grouped_mlp

needs_mosaic = pytest.mark.skipif(
    dispatch.jax_version() < dispatch.MIN_JAX, reason="needs JAX 0.11: the interpreter of Mosaic GPU kernels"
)


def case(tokens: int, k: int, experts: int, size: int, width: int, dtype: str, crowd: int = 0) -> tuple[jax.Array, ...]:
    """Arguments of `grouped_mlp`; the first `crowd` tokens all choose the same experts."""
    draw = np.random.default_rng(tokens + experts)
    chosen = draw.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :k]
    chosen[:crowd] = chosen[0]
    x = draw.normal(size=(tokens, size))
    gate_up, down = draw.normal(size=(experts, size, 2, width)), draw.normal(size=(experts, width, size))
    arrays = (x, gate_up / size**0.5, down / width**0.5)
    x, gate_up, down = (jnp.asarray(a, dtype) for a in arrays)
    return x, jnp.asarray(chosen, jnp.int32), gate_up, down


def loop(x: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array) -> np.ndarray:
    """f64[T, k, E], one token and one expert at a time."""
    x, gate_up, down = (np.asarray(a, np.float64) for a in (x, gate_up, down))  # type: ignore[assignment]
    found = np.zeros((*chosen.shape, x.shape[1]))
    for t, j in np.ndindex(*chosen.shape):
        expert = int(chosen[t, j])
        gate, up = x[t] @ gate_up[expert, :, 0], x[t] @ gate_up[expert, :, 1]
        found[t, j] = (gate / (1 + np.exp(-gate)) * up) @ down[expert]
    return found


@pytest.mark.parametrize("form", [grouped_mlp, grouped._ragged], ids=["here", "ragged_dot"])
@pytest.mark.parametrize(("shape", "crowd"), [((74, 3, 5, 12, 10), 70), ((1, 1, 4, 8, 8), 0)], ids=["many", "one"])
def test_plain(shape: tuple[int, ...], crowd: int, form: Any) -> None:
    arguments = case(*shape, "float32", crowd)
    np.testing.assert_allclose(jax.jit(form)(*arguments), loop(*arguments), rtol=1e-5, atol=1e-5)


def test_ranks_by_comparison_and_by_sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 7, 50)
    expected = [int(np.sum(values[:i] == values[i])) for i in range(50)]
    flat = jnp.asarray(values, jnp.int32)
    sizes = grouped._sizes(flat, 9)
    assert sizes.tolist() == np.bincount(values, minlength=9).tolist()
    assert grouped._ranks(flat, sizes).tolist() == expected
    monkeypatch.setattr(grouped, "_COMPARED", 0)
    assert grouped._ranks(flat, sizes).tolist() == expected


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "crowd"), [(1, 8, 256, 0), (75, 3, 40, 70), (200, 2, 7, 0)], ids=str
)
def test_layout_kernel_in_numpy(tokens: int, k: int, experts: int, crowd: int) -> None:
    """One token; experts with several items beside some with none; more bits than a word, fewer experts than a warp."""
    draw = np.random.default_rng(tokens)
    chosen = draw.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :k].astype(np.int32)
    chosen[:crowd] = chosen[0]
    wanted = grouped.lay_out(jnp.asarray(chosen), experts)
    rows, items = grouped._at_most(jnp.asarray(chosen), experts)
    found = grouped.Layout(
        *grouped_layout.lay_out(
            chosen, experts, rows=rows, items=items, align=grouped.ALIGN, tile=grouped.ROWS, launch=lanes_numpy.launch
        )
    )
    assert found.items == wanted.items
    there = np.arange(items) < found.items
    for name in ("token", "row", "start", "filled"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)
    np.testing.assert_array_equal(found.expert[there], np.asarray(wanted.expert)[there])


@pytest.mark.parametrize(("dtype", "splits"), [("bfloat16", 2), ("float32", 0)])
def test_rows_of_experts_and_back_in_numpy(dtype: str, splits: int) -> None:
    draw = np.random.default_rng(0)
    x, out = (jnp.asarray(draw.normal(size=(rows, 24)), jnp.bfloat16) for rows in (5, 700))
    token, row = draw.integers(0, 5, 700).astype(np.int32), draw.permutation(700)[:15].astype(np.int32)
    np.testing.assert_array_equal(grouped_rows.spread(x, token, launch=lanes_numpy.launch), x[token])
    weights = draw.random((5, 3)).astype(np.float32)
    extra = jnp.asarray(draw.normal(size=(splits, 5, 24)), jnp.bfloat16) if splits else None
    found = grouped_rows.combine(out, row, weights, extra, dtype=jnp.dtype(dtype), launch=lanes_numpy.launch)
    wanted = np.einsum("tj,tje->te", weights, np.asarray(out, np.float32)[row].reshape(5, 3, 24))
    if extra is not None:
        wanted = wanted + np.asarray(extra, np.float32).sum(axis=0)
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=1e-2 if splits else 1e-6, atol=1e-6)


def test_what_the_layout_kernel_does_not_do() -> None:
    chosen = jax.ShapeDtypeStruct((512, 8), jnp.int32)
    assert dispatch.lay_out_missing(chosen, 256) is None
    for tokens, experts in ((8192, 256), (1, 2048)):
        chosen = jax.ShapeDtypeStruct((tokens, 8), jnp.int32)
        assert f"{tokens} tokens and {experts} experts are too many" in (
            dispatch.lay_out_missing(chosen, experts) or ""
        )


def test_shapes_that_do_not_fit() -> None:
    x, chosen, gate_up, down = case(4, 2, 3, 8, 8, "float32")
    with pytest.raises(ValueError, match=re.escape("not [4, 8], [4, 2], [3, 8, 2, 8] and [2, 8, 8]")):
        grouped_mlp(x, chosen, gate_up, down[:2])


@needs_mosaic
@pytest.mark.slow
def test_kernel_in_the_interpreter() -> None:
    """Two experts with more rows than a program takes beside some with few and some with none; of the two column groups
    of a gated program only one exists."""
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    from pallas_kernels import grouped_mosaic

    arguments = case(74, 2, 12, 128, 64, "bfloat16", crowd=68)
    assert np.bincount(np.asarray(arguments[1]).ravel(), minlength=12).min() == 0
    config = grouped_mosaic.GroupedConfig(2, 2)
    with plgpu.force_gpu_interpret_mode():
        found = np.asarray(grouped._kernel(*arguments, configs=(config, config)))
    np.testing.assert_allclose(found, loop(*arguments), rtol=4e-2, atol=4e-2)


@needs_mosaic
@pytest.mark.parametrize("tokens", [32, 512])
def test_kernel_is_lowered(tokens: int) -> None:
    """LLaDA2-mini's layer, for an H100 on a machine without one."""
    of = jax.ShapeDtypeStruct
    bf16 = jnp.bfloat16
    arguments = (
        of((tokens, 2048), bf16), of((tokens, 8), jnp.int32), of((256, 2048, 2, 512), bf16), of((256, 512, 2048), bf16),
    )  # fmt: skip
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(grouped_mlp).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") >= 3
    assert "lay_out_experts" in text
    assert "ragged_dot" not in text
