"""The skinny matmuls' plain forms, and which of them have a kernel, on any machine."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels import dispatch
from pallas_kernels.attention_plan import SMEM_LIMIT
from pallas_kernels.stream_matmul import gated_matmul, stream_matmul


def test_plain_forms():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(5, 12)), rng.normal(size=(12, 2, 7))
    product = np.einsum("te,ecf->ctf", x, w)
    x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    np.testing.assert_allclose(stream_matmul(x, w[:, 0]), product[:1], rtol=1e-5, atol=1e-5)
    gate, up = product
    np.testing.assert_allclose(gated_matmul(x, w), gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-5)


def test_mistakes():
    x = jnp.zeros((4, 64))
    with pytest.raises(ValueError, match=r"stream_matmul takes x \[T, E\] and w \[E, F\]"):
        stream_matmul(x, jnp.zeros((32, 8)))
    with pytest.raises(ValueError, match=r"gated_matmul takes x \[T, E\] and w \[E, 2, F\]"):
        gated_matmul(x, jnp.zeros((64, 3, 8)))
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        stream_matmul(x, jnp.zeros((64, 8)), implementation="triton")


OF = jax.ShapeDtypeStruct
HALF = jnp.bfloat16
REFUSALS = {
    "dtype": (OF((8, 64), jnp.float32), OF((64, 128), jnp.float32), "takes bfloat16 or float16"),
    "mixed": (OF((8, 64), HALF), OF((64, 128), jnp.float16), "arrays of one dtype"),
    "tokens": (OF((12, 64), HALF), OF((64, 128), HALF), "a multiple of 8 tokens up to 256, not 12"),
    "odd": (OF((129, 64), HALF), OF((64, 128), HALF), "a multiple of 8 tokens up to 256, not 129"),
    "many": (OF((264, 64), HALF), OF((64, 128), HALF), "not 264"),
    "depth": (OF((8, 32), HALF), OF((32, 128), HALF), "tiles of 64 rows"),
    "columns": (OF((8, 64), HALF), OF((64, 192), HALF), "128 columns"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_has_no_kernel(case):
    x, w, sentence = REFUSALS[case]
    why = dispatch.stream_matmul_missing(x, w)
    assert why is not None
    assert sentence in why
    with pytest.raises(NotImplementedError):
        jax.eval_shape(functools.partial(stream_matmul, implementation="mosaic_gpu"), x, w)


def lower_for_h100(f, *arguments):
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


needs_mosaic = pytest.mark.skipif(
    dispatch.jax_version() < dispatch.MIN_JAX, reason="needs JAX 0.11: Mosaic GPU kernels"
)


@needs_mosaic
def test_cuts_that_do_not_fit_few_tokens():
    from pallas_kernels import stream_matmul_mosaic as skinny

    def check(sentence, tokens, config, gated=False):
        shape = (64, 2, 256) if gated else (64, 256)
        with pytest.raises(ValueError, match=sentence):
            jax.eval_shape(
                functools.partial(skinny.matmul, gated=gated, config=config), OF((tokens, 64), HALF), OF(shape, HALF)
            )

    check("up to 64 tokens, not 72: stream_matmul_wide", 72, skinny.MatmulConfig(1, 1, 4))
    check("and needs 2 stages", 32, skinny.MatmulConfig(1, 1, 1))
    check("1 split if gated", 32, skinny.MatmulConfig(1, 2, 4), gated=True)
    check("bytes of 232448", 32, skinny.MatmulConfig(2, 1, 6))


@needs_mosaic
def test_cuts_that_do_not_fit_many_tokens():
    from pallas_kernels import stream_matmul_wide as wide

    def check(sentence, tokens, columns, config, gated=False):
        shape = (64, 2, columns) if gated else (64, columns)
        with pytest.raises(ValueError, match=sentence):
            jax.eval_shape(
                functools.partial(wide.matmul, gated=gated, config=config), OF((tokens, 64), HALF), OF(shape, HALF)
            )

    check("128, 192", 256, 256, wide.WideConfig(256, 1, 4))
    check("no more than there are", 256, 128, wide.WideConfig(192, 1, 4))
    check("a gated product has 1 split", 256, 256, wide.WideConfig(128, 2, 4), gated=True)
    check("from 1 to 1, its steps: not 2", 256, 256, wide.WideConfig(128, 2, 4))
    check("a multiple of 8 tokens from 65 to 256, not 132", 132, 256, wide.WideConfig(128, 1, 4))
    check("from 65 to 256, not 64", 64, 256, wide.WideConfig(128, 1, 4))
    check("for 256 tokens, and needs at least 3 stages", 256, 256, wide.WideConfig(192, 1, 2))
    check("bytes of 232448", 256, 256, wide.WideConfig(192, 1, 5))
    check("128, 192, 256, 320", 256, 512, wide.WideConfig(384, 1, 4, 128))
    check("no more than there are", 256, 512, wide.WideConfig(320, 1, 4, 128))  # 256 at once, unless they are halves
    check(r"a program computes \(256,\) of 200 tokens, not 128", 200, 256, wide.WideConfig(128, 1, 4, 128))
    check(r"a program computes \(128,\) of 72 tokens, not 256", 72, 256, wide.WideConfig(128, 1, 4))
    check(r"has \(\) columns", 256, 256, wide.WideConfig(128, 1, 4, 64))


@needs_mosaic
@pytest.mark.parametrize("tokens", [72, 128, 136, 192, 256])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("depth", "columns"), [(64, 128), (1536, 2048), (4096, 12288), (18944, 3584)])
def test_chosen_cuts_fit(tokens, gated, depth, columns):
    from pallas_kernels import stream_matmul_wide as wide

    config = wide.make_config(tokens, depth, columns, gated)
    assert wide.smem_bytes(tokens, config) <= SMEM_LIMIT
    assert config.stages >= 4
    assert config.splits <= (1 if gated else depth // 64)
    assert config.columns <= columns * (1 + gated)


# (depth, columns, gated): (columns, splits, rows) of the fastest of the cuts that were measured with 256 tokens.
FASTEST = {
    (1536, 8960, True): (320, 1, 128), (8960, 1536, False): (128, 5, 128), (1536, 2048, False): (128, 4, 128),
    (2048, 6144, True): (192, 1, 128), (6144, 2048, False): (128, 4, 128), (2048, 4096, False): (128, 2, 128),
    (4096, 12288, True): (192, 1, 256), (12288, 4096, False): (192, 3, 128), (4096, 6144, False): (192, 2, 128),
    (4096, 4096, False): (128, 2, 128), (3584, 18944, True): (320, 1, 128), (3584, 4608, False): (256, 3, 128),
}  # fmt: skip
# And with 128, where it was not a matter of reading more partial sums again: those of small products are not here.
FASTEST_OF_128 = {
    (3584, 4608, False): (128, 3), (3584, 3584, False): (128, 3), (3584, 18944, True): (320, 1),
    (18944, 3584, False): (128, 3), (4096, 6144, False): (128, 2), (4096, 4096, False): (128, 3),
    (4096, 12288, True): (256, 1), (12288, 4096, False): (128, 3), (1536, 8960, True): (256, 1),
    (2048, 4096, False): (128, 3), (2048, 6144, True): (128, 1),
}  # fmt: skip


@needs_mosaic
@pytest.mark.parametrize(
    ("tokens", "product", "fastest"),
    [(256, *case) for case in FASTEST.items()] + [(128, key, (*cut, 128)) for key, cut in FASTEST_OF_128.items()],
)
def test_the_cut_is_the_fastest_of_those_measured(tokens, product, fastest):
    """On an H200 (docs/kernels-matmul.md): the estimate by which a cut is chosen ranks them so."""
    from pallas_kernels import stream_matmul_wide as wide

    config = wide.make_config(tokens, *product)
    assert (config.columns, config.splits, config.rows) == fastest


@needs_mosaic
@pytest.mark.parametrize("tokens", [32, 72, 136, 256])
def test_lowers_for_an_h100(tokens):
    """With the tiles of real layers; and the plain form leaves as many partial sums."""

    def both(x, w, gates):
        return stream_matmul(x, w), gated_matmul(x, gates)

    shapes = OF((tokens, 4096), HALF), OF((4096, 6144), HALF), OF((4096, 2, 12288), HALF)
    text = lower_for_h100(both, *shapes)
    assert len(re.findall("custom_call @mosaic_gpu", text)) == 2
    splits = {32: 5, 72: 2, 136: 4, 256: 2}[tokens]
    assert f"tensor<{splits}x{tokens}x6144xbf16>" in text
