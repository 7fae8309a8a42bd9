"""Host memory seen from traced code: what is in it, moving in and out of it, and reading it in place.

A ``pinned_host`` array is page-locked host memory that the GPU can address. JAX records it in the array's type
(``f32<host>[...]``), XLA in the layout (``S(5)``). Three things can be done with such a value inside ``jit``:

* copy it, or a slice of it, to device memory (:func:`copy_to_device`); XLA turns that into a DMA transfer;
* write device data into it with ``lax.dynamic_update_slice`` after :func:`copy_to_host`; donated, that is in place;
* hand it to a kernel as it is, so that the kernel's own loads cross PCIe (:func:`read_in_place`).

The last one is a trick, and this is the only module that knows it. Mosaic GPU refuses an operand whose type says host
("src must be a GMEM reference"), although the address is as good as any other on the device. The primitive below
changes the type and nothing else: it lowers to its own operand, so the compiled program feeds the host buffer
straight to the custom call (the ``S(5)`` is still visible there) and no byte is copied. It is sound for operands that a
kernel only *reads*: XLA believes the value to be in device memory, and would be right to place a result there.

A kernel that *changes* a host buffer in place needs the claim both ways, :func:`read_in_place` before it and
:func:`still_in_host_memory` after it, and one more thing: the buffer must be a donated argument of the program, or XLA
would make the copy that keeps the caller's array intact in device memory. So only a program that donates it itself, and
does nothing else with it, may do this (:func:`pallas_kernels.gather_rows.write_block`).

XLA's own gather is no way around: given such an operand it refuses to compile, or computes on the host.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

__all__ = ["copy_to_device", "copy_to_host", "is_host", "read_in_place", "still_in_host_memory"]

_retype_p = Primitive("herald_retype_memory")


@_retype_p.def_abstract_eval
def _retype_abstract_eval(aval: Any, *, space: Any) -> Any:
    return aval.update(memory_space=space)


@_retype_p.def_impl
def _retype_impl(x: jax.Array, *, space: Any) -> jax.Array:
    # Evaluated on its own, the result would claim one memory while living in the other; only inside one compiled
    # program, between a parameter and the kernel that reads it, does the claim harm nobody.
    raise RuntimeError(
        "a kernel reads an array in host memory where it is only inside jax.jit; wrap the call in jax.jit"
    )


def _retype_lowering(ctx: Any, x: Any, *, space: Any) -> list[Any]:
    del ctx, space
    return [x]


def _retype_batching(args: Any, dims: Any, *, space: Any) -> tuple[Any, Any]:
    return _retype_p.bind(*args, space=space), dims[0]


mlir.register_lowering(_retype_p, _retype_lowering)
batching.primitive_batchers[_retype_p] = _retype_batching


def is_host(x: jax.Array) -> bool:
    """Whether ``x`` (an array or a tracer) is in host memory by its type."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def copy_to_device(x: jax.Array) -> jax.Array:
    """``x`` in device memory: a copy for a host value, ``x`` itself otherwise. For use under ``jit``."""
    return jax.device_put(x, jax.memory.Space.Device) if is_host(x) else x


def copy_to_host(x: jax.Array) -> jax.Array:
    """``x`` in host memory: a copy for a device value, ``x`` itself otherwise. For use under ``jit``."""
    return x if is_host(x) else jax.device_put(x, jax.memory.Space.Host)


def read_in_place(x: jax.Array) -> jax.Array:
    """The same buffer, typed as device memory, for a kernel that only reads it. For use under ``jit`` alone.

    Never return the result, donate it, or let anything but a kernel consume it: see the module's docstring.
    """
    return _retype_p.bind(x, space=jax.memory.Space.Device) if is_host(x) else x


def still_in_host_memory(x: jax.Array) -> jax.Array:
    """The result of a kernel that changed a :func:`read_in_place` operand in place, typed as what it is."""
    return _retype_p.bind(x, space=jax.memory.Space.Host)
