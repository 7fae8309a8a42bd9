"""Programs compiled ahead, their kernels lowered in processes of their own.

Lowering a Mosaic kernel is Python and holds the interpreter's lock: about two seconds for one attention kernel, one
after the other for all cases of a benchmark. Several processes that need no GPU lower for an H200 in abstract and send
back the program (`jax.export`); this process compiles it, which takes a fraction of that and lets other threads run.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

Program = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]


class Workshop:
    """Compiled programs by name. Use as a context manager: leaving it ends the processes.

    Args:
      processes: how many lower kernels; 0 lowers in this process, as does a machine without a GPU or without
        flatbuffers (which `jax.export` writes with).
    """

    def __init__(self, processes: int | None = None):
        if processes is None:
            processes = max(1, min(14, (os.cpu_count() or 2) - 2))
        if jax.default_backend() != "gpu" or importlib.util.find_spec("flatbuffers") is None:
            processes = 0
        self._kind = jax.devices()[0].device_kind
        self._processes: ProcessPoolExecutor | None = None
        if processes:
            # Compiling a program that came from elsewhere needs what this import tells XLA: where Mosaic's runtime is.
            importlib.import_module("jax.experimental.pallas.mosaic_gpu")
            context = multiprocessing.get_context("spawn")  # a fork would inherit this process's CUDA
            self._processes = ProcessPoolExecutor(processes, mp_context=context, initializer=_without_gpu)
        self._threads = ThreadPoolExecutor(16)  # most of them wait for a process
        self._made: dict[Any, Future] = {}

    @classmethod
    def of(cls, context: dict[str, Any]) -> AbstractContextManager[Workshop]:
        """The one that ``context["shop"]`` holds, which stays open, or one of its own."""
        return nullcontext(context["shop"]) if "shop" in context else cls()

    def __enter__(self) -> Workshop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._processes is not None:
            self._processes.shutdown(cancel_futures=True)  # first: threads wait for what they lower
        self._threads.shutdown(cancel_futures=True)

    def add(self, programs: Mapping[Any, Program], *, kernels: bool = True) -> None:
        """Begins with programs: name -> (function, shapes of its arguments).

        `kernels`: they hold Mosaic kernels, so lower them elsewhere; the functions must then be picklable (of a module,
        or `functools.partial` of one). Others are lowered here.
        """
        for name, (fn, shapes) in programs.items():
            elsewhere = None
            if kernels and self._processes is not None:
                elsewhere = self._processes.submit(lower, fn, shapes, self._kind)
            self._made[name] = self._threads.submit(_compile, fn, shapes, elsewhere)

    def __getitem__(self, name: Any) -> Callable[..., Any]:
        """The compiled program, when it is ready."""
        return self._made[name].result()


def _without_gpu() -> None:
    """In a process that lowers: JAX must not take a share of the GPU's memory."""
    jax.config.update("jax_platforms", "cpu")


def lower(fn: Callable[..., Any], shapes: tuple[jax.ShapeDtypeStruct, ...], device_kind: str) -> bytes:
    """The program of `fn` for a CUDA device of that kind, serialised."""
    device = AbstractDevice(device_kind=device_kind, num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("one",), (AxisType.Auto,), abstract_device=device)
    # The kernels are compiled by the version of JAX that lowered them: what the check protects from cannot happen.
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2")]
    with jax.sharding.use_abstract_mesh(mesh):
        exported = export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=checks)(*shapes)
    return bytes(exported.serialize())


def _compile(fn: Callable[..., Any], shapes: tuple[jax.ShapeDtypeStruct, ...], lowered: Future | None) -> Any:
    call = fn if lowered is None else export.deserialize(bytearray(lowered.result())).call
    return jax.jit(call).lower(*shapes).compile()
