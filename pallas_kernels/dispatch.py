"""Which implementation of a kernel runs where. Every capability check of this package is in this file.

`implementation=None` means "the best one that works here"; a name means exactly that one. Asking for one by name never
falls back: `NotImplementedError` says that it does not support this case or this machine, and why; `ValueError` is the
caller's mistake.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_layout import MOST_WORDS, shared_words

Implementation = Literal["xla", "mosaic_gpu"]
IMPLEMENTATIONS: tuple[str, ...] = ("xla", "mosaic_gpu")

# The first version with the Mosaic GPU interface these kernels are written against.
MIN_JAX = (0, 11, 0)
# device_kind prefixes of compute capability 9.0; used only for abstract devices, which carry no capability.
HOPPER_KINDS = ("NVIDIA H100", "NVIDIA H200", "NVIDIA H800", "NVIDIA H20", "NVIDIA GH200")


def jax_version() -> tuple[int, ...]:
    return tuple(jax.version.__version_info__)


def mosaic_gpu_missing() -> str | None:
    """Why no Mosaic GPU kernel of this package can be lowered in this process, or None if one can.

    The target is the abstract device of the current abstract mesh if it has one (ahead-of-time lowering on a machine
    without a GPU), else this process's CUDA devices.
    """
    if jax_version() < MIN_JAX:
        return f"the Mosaic GPU kernels need JAX {'.'.join(map(str, MIN_JAX))} or newer; this is {jax.__version__}"
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        if abstract.device_kind.startswith(HOPPER_KINDS):
            return None
        return f"the Mosaic GPU kernels need compute capability 9.0 (Hopper); the abstract device is {abstract}"
    return _no_hopper_device()


@functools.cache
def _no_hopper_device() -> str | None:
    try:
        devices = jax.devices("cuda")
    except RuntimeError:  # what JAX raises for a platform it has no devices of
        return "the Mosaic GPU kernels need an NVIDIA GPU, and JAX sees none in this process"
    capabilities = sorted({str(getattr(d, "compute_capability", "unknown")) for d in devices})
    if capabilities != ["9.0"]:
        return f"the Mosaic GPU kernels need compute capability 9.0 (Hopper); the devices here have {capabilities}"
    return None


def block_attention_missing(q: Any, k: Any) -> str | None:
    """Why `block_attention` has no Mosaic GPU kernel for arguments of these shapes and dtypes, or None if it has."""
    if jnp.dtype(q.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"block_attention on mosaic_gpu takes bfloat16 or float16, not {jnp.dtype(q.dtype).name}"
    if q.shape[-1] not in (64, 128):
        return (
            f"block_attention on mosaic_gpu has tiles for head dim 64 and 128, not {q.shape[-1]}: the swizzled layout "
            "that wgmma reads comes in columns of 64, and at 256 the accumulators of a tile do not fit the registers"
        )
    if k.shape[-2] % 8:
        return (
            f"block_attention on mosaic_gpu needs a cache whose length is a multiple of 8, not {k.shape[-2]}: copies "
            "into the layout that wgmma reads go by 8 rows (allocate a longer one; lengths may be anything)"
        )
    if k.shape[-2] < 1 or q.shape[1] < 1 or q.shape[0] < 1:
        return "block_attention on mosaic_gpu needs at least one batch row, one query and one KV entry"
    return None


def gather_rows_missing(k: Any) -> str | None:
    """Why `gather_rows` has no Mosaic GPU kernel for sources like `k`, or None if it has."""
    row_bytes = k.shape[-1] * jnp.dtype(k.dtype).itemsize
    if row_bytes % 16:
        return (
            f"gather_rows on mosaic_gpu moves rows in 16-byte chunks; {k.shape[-1]} x {jnp.dtype(k.dtype).name} is "
            f"{row_bytes} bytes"
        )
    return None


def index_scores_missing(codes: Any, scales: Any, q: Any) -> str | None:
    """Why `index_scores.importance` has no Mosaic GPU kernel for layers like this, or None if it has."""
    dim, packed = q.shape[-1], jnp.dtype(codes.dtype) == jnp.uint8
    groups = dim // 32 if packed else 1
    if dim not in (64, 128) or scales.shape[-1] != groups:
        return (
            "index_scores on mosaic_gpu multiplies 32 numbers of an entry at once: head dim 64 or 128, a scale for "
            f"each 32 numbers of 4 bits or for all of 8, not {scales.shape[-1]} for {dim} of {4 if packed else 8}"
        )
    if not 1 <= q.shape[-2] <= 8:
        return f"index_scores on mosaic_gpu keeps up to 8 queries of a head in registers, not {q.shape[-2]}"
    if codes.shape[2] * groups % 2 or codes.size == 0:
        return f"index_scores on mosaic_gpu reads scales two by two: not of {codes.shape[2]} slots with {groups} each"
    return None


def scatter_rows_missing(k: Any, *, in_host_memory: bool) -> str | None:
    """Why `scatter_rows` has no Mosaic GPU kernel for caches like `k`, or None if it has."""
    if in_host_memory:
        return (
            "scatter_rows on mosaic_gpu writes device memory only: XLA's form and write_block do host caches in place"
        )
    return gather_rows_missing(k)


def _two_bytes_missing(name: str, dtype: Any) -> str | None:
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"{name} on mosaic_gpu takes bfloat16 or float16, not {jnp.dtype(dtype).name}"
    return None


def add_norm_missing(x: Any, parts: Any) -> str | None:
    """Why `add_norm` has no Mosaic GPU kernel for these arguments, or None if it has."""
    if parts is not None and jnp.dtype(parts.dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(x.dtype)):
        return f"add_norm on mosaic_gpu adds float32 or {x.dtype} to {x.dtype}, not {parts.dtype}"
    if x.shape[1] % 8 or x.shape[0] < 1:
        return f"add_norm on mosaic_gpu reads rows in 16-byte chunks: a multiple of 8 numbers, not {x.shape[1]}"
    return _two_bytes_missing("add_norm", x.dtype)


def project_heads_missing(parts: Any, dtype: Any, head_dim: int, rotated: int) -> str | None:
    """Why `project_heads` has no Mosaic GPU kernel for these arguments, or None if it has."""
    if parts is not None and jnp.dtype(parts.dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(dtype)):
        return f"project_heads on mosaic_gpu adds float32 or {jnp.dtype(dtype)}, not {parts.dtype}"
    if head_dim not in (64, 128):
        return f"project_heads on mosaic_gpu shares a head among 16 or 32 threads: head dim 64 or 128, not {head_dim}"
    if rotated not in (8, 16, 32, 64, 128):
        return f"project_heads on mosaic_gpu turns 8, 16, 32, 64 or 128 numbers of a head, not {rotated}"
    return _two_bytes_missing("project_heads", dtype)


def stream_matmul_missing(x: Any, w: Any) -> str | None:
    """Why `stream_matmul` and `gated_matmul` have no Mosaic GPU kernel for these arguments, or None if they have."""
    tokens, depth = x.shape
    if x.dtype != w.dtype:
        return f"stream_matmul on mosaic_gpu multiplies arrays of one dtype, not {x.dtype} and {w.dtype}"
    if tokens % 8 or not 8 <= tokens <= 256:
        return (
            f"stream_matmul on mosaic_gpu takes a multiple of 8 tokens up to 256, not {tokens}: its tiles come in "
            "groups of 8 rows, and with more tokens arithmetic and not the weights is what takes the time"
        )
    if depth % 64 or w.shape[-1] % (64 if w.ndim == 3 else 128):
        return (
            f"stream_matmul on mosaic_gpu has tiles of 64 rows and 128 columns of the weights (gated: 64), which "
            f"{list(w.shape)} is no multiple of"
        )
    return _two_bytes_missing("stream_matmul", x.dtype)


def head_statistics_missing(x: Any, w: Any) -> str | None:
    """Why `head_statistics` has no Mosaic GPU kernel for these arguments, or None if it has."""
    tokens, depth = x.shape
    if x.dtype != w.dtype:
        return f"head_statistics on mosaic_gpu multiplies arrays of one dtype, not {x.dtype} and {w.dtype}"
    if tokens % 8 or not 8 <= tokens <= 256:
        return f"head_statistics on mosaic_gpu takes a multiple of 8 tokens up to 256, not {tokens}"
    if depth % 64 or w.shape[0] < 128:
        return f"head_statistics on mosaic_gpu has tiles of 128 words and 64 numbers of each, not of {list(w.shape)}"
    return _two_bytes_missing("head_statistics", x.dtype)


def grouped_mlp_missing(x: Any, gate_up: Any) -> str | None:
    """Why `grouped_mlp` has no Mosaic GPU kernel for these arguments, or None if it has."""
    if x.dtype != gate_up.dtype:
        return f"grouped_mlp on mosaic_gpu multiplies arrays of one dtype, not {x.dtype} and {gate_up.dtype}"
    if x.shape[1] % 128 or gate_up.shape[-1] % 64:
        return (
            "grouped_mlp on mosaic_gpu has tiles of 128 columns of a token and 64 of an expert, which widths "
            f"{x.shape[1]} and {gate_up.shape[-1]} are no multiples of"
        )
    return _two_bytes_missing("grouped_mlp", x.dtype)


def lay_out_missing(chosen: Any, experts: int) -> str | None:
    """Why `grouped.lay_out` has no Mosaic GPU kernel for these arguments, or None if it has."""
    if experts > 1024 or shared_words(chosen.shape[0], experts) > MOST_WORDS:
        return (
            "lay_out on mosaic_gpu is one thread block, with a thread for each expert and in shared memory a bit for "
            f"each token and expert: {chosen.shape[0]} tokens and {experts} experts are too many"
        )
    return None


def choose_experts_missing(logits: Any, groups: int, k: int) -> str | None:
    """Why `choose_experts` has no Mosaic GPU kernel for these arguments, or None if it has."""
    experts = logits.shape[-1]
    if experts % 128 or experts > 1024 or 32 % groups or k > 32:
        return (
            "choose_experts on mosaic_gpu shares a token's experts among 32 threads, 4 or more each: a multiple of 128 "
            f"experts up to 1024, whole threads to a group and up to 32 choices, not {experts} experts in {groups} "
            f"groups and {k}"
        )
    return None


def select(implementation: str | None, missing: Callable[[], str | None]) -> str:
    """The implementation to use: "xla", "mosaic_gpu", or "auto" (mosaic_gpu where lowered for CUDA, xla elsewhere).

    `missing` says why the kernel does not support the arguments, or None; it is asked only where that matters.
    """
    if implementation is None:
        return "xla" if mosaic_gpu_missing() or missing() else "auto"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, not {implementation!r}")
    if implementation == "mosaic_gpu":
        why = mosaic_gpu_missing() or missing()
        if why:
            raise NotImplementedError(why)
    return implementation


def run(chosen: str, mosaic_gpu: Callable[..., Any], xla: Callable[..., Any], *args: Any) -> Any:
    """Calls the chosen form with `args`. "auto" is decided by the platform that the computation is lowered for."""

    def kernel(*args):
        return _varying_like(args, mosaic_gpu(*args))

    if chosen == "mosaic_gpu":
        return kernel(*args)
    if chosen == "xla":
        return xla(*args)
    return lax.platform_dependent(*args, cuda=kernel, default=xla)


def _varying_like(args: Any, results: Any) -> Any:
    """The results, typed as varying over the mesh axes that any of the arguments varies over.

    Inside a shard_map a kernel's results come out typed as the same on every device, whatever it read.
    """

    def varying(x) -> frozenset[Any]:
        return frozenset(jax.typeof(x).manual_axis_type.varying)

    axes = frozenset().union(*(varying(x) for x in jax.tree.leaves(args)))

    def cast(x):
        missing = tuple(axis for axis in sorted(axes, key=str) if axis not in varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, results)
