"""What a run can report about itself."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import jax


@dataclasses.dataclass
class OffloadStats:
    """What HERALD's pipeline counted.

    Attributes:
      selector: who scored the keys.
      scanned_by: by what the CPU scanned them, and why by XLA; "" if it did not.
      blocks: selections made beside a block (a batch's rows share them).
      host_bytes, pool_bytes, dense_bytes, index_bytes: the cache in host memory; on the device both pools, the layers
        kept whole, and the quantised keys.
      fetched_bytes: K and V that crossed PCIe to fill pools; reused_bytes: what the pool before already held.
      scan_seconds, scan_bytes: the CPU's scans, waiting for their programs to be compiled included, and the keys they
        read.
      scan_exposed_seconds: of these, the time for which nothing was left to denoise.
      fetch_seconds, fetch_exposed_seconds: likewise of what crossed PCIe to fill pools, by the device's clock; 0 unless
        `Herald(measure=True)`. What is fetched in parts has no steps beside it, but the scan of the next part.
    """

    selector: str = "cpu"
    scanned_by: str = ""
    blocks: int = 0
    host_bytes: int = 0
    pool_bytes: int = 0
    dense_bytes: int = 0
    index_bytes: int = 0
    fetched_bytes: int = 0
    reused_bytes: int = 0
    scan_seconds: float = 0.0
    scan_bytes: int = 0
    scan_exposed_seconds: float = 0.0
    fetch_seconds: float = 0.0
    fetch_exposed_seconds: float = 0.0

    @property
    def reuse(self) -> float:
        """Share of the pools' selected entries that were not fetched again."""
        return self.reused_bytes / max(self.fetched_bytes + self.reused_bytes, 1)

    @property
    def scan_hidden(self) -> float:
        """Share of the scans' time that ran behind denoising."""
        return 1.0 - self.scan_exposed_seconds / self.scan_seconds if self.scan_seconds else 1.0

    @property
    def fetch_hidden(self) -> float | None:
        """Share of the fetches' time that ran beside denoising; None if not measured."""
        return 1.0 - self.fetch_exposed_seconds / self.fetch_seconds if self.fetch_seconds else None

    def lines(self) -> list[str]:
        """The report that `--stats` prints."""
        per_block = max(self.blocks, 1)
        scanned = f" ({self.scanned_by})" if self.scanned_by else ""
        rate = self.scan_bytes / self.scan_seconds / 1e9 if self.scan_seconds else 0.0
        report = [
            f"host KV cache       {self.host_bytes / 2**20:.1f} MiB",
            f"device              {self.pool_bytes / 2**20:.1f} MiB of pools, {self.dense_bytes / 2**20:.1f} MiB of "
            f"dense layers, {self.index_bytes / 2**20:.1f} MiB of index",
            f"over PCIe           {self.fetched_bytes / per_block / 2**20:.2f} MiB per block; {self.reuse:.1%} of the "
            "selected entries were on the device already",
            f"selection           {self.selector}{scanned}: {self.scan_seconds / per_block * 1e3:.2f} ms per block "
            f"({rate:.1f} GB/s), {self.scan_hidden:.1%} hidden behind {self.blocks} blocks",
        ]
        if self.fetch_hidden is not None:
            milliseconds = self.fetch_seconds / per_block * 1e3
            report.append(f"fetching            {milliseconds:.2f} ms per block, {self.fetch_hidden:.1%} hidden")
        return report


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts and times of one `generate` call.

    Attributes:
      rows: prompts in the batch.
      prompt_tokens, new_tokens: summed over rows.
      batch_forwards: forwards the device ran (prefill not counted); rows share them.
      forwards: forwards summed over the rows that were still writing: denoising steps and commits.
      denoise_steps, commits: what `forwards` consists of.
      blocks: finished blocks, summed over rows.
      sparse_blocks: blocks whose budget was below their prefix, summed over rows (0 under the dense plan).
      exact_forwards: batch forwards that attended to everything in order to select (0 under the dense plan).
      recall_sum, mass_sum, measured: sums over layers, rows and sparse steps of the recall and the kept mass that
        `Mage(measure=True)` found, and how many were summed; see `recall` and `mass_kept`.
      prefill_seconds, decode_seconds: wall time, less the time for which the calling thread itself compiled. Waiting
        for what another thread compiles (HERALD's scans, the first time) is part of it.
      compile_seconds: wall time for which the calling thread traced, lowered or compiled in prefill and decoding; what
        other threads compile beside it is in no figure.
      kv_bytes: allocated KV cache, all devices together.
      edited_tokens: tokens rewritten after they were first revealed (0 but under `denoise.Editing`).
      offload: HERALD's counters; None under the other plans.
    """

    rows: int
    prompt_tokens: int
    new_tokens: int
    batch_forwards: int
    forwards: int
    denoise_steps: int
    commits: int
    blocks: int
    sparse_blocks: int
    exact_forwards: int
    recall_sum: float
    mass_sum: float
    measured: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    kv_bytes: int
    edited_tokens: int = 0
    offload: OffloadStats | None = None

    @property
    def tokens_per_forward(self) -> float:
        """New tokens per forward of a row: 1 is what autoregressive decoding reaches."""
        return self.new_tokens / max(self.forwards, 1)

    @property
    def steps_per_block(self) -> float:
        """Denoising steps per finished block."""
        return self.denoise_steps / max(self.blocks, 1)

    @property
    def recall(self) -> float | None:
        """Share of each later step's exact top entries that the block's selection held; None if not measured."""
        return self.recall_sum / self.measured if self.measured else None

    @property
    def mass_kept(self) -> float | None:
        """Share of the prefix's attention that fell on selected entries at later steps; None if not measured."""
        return self.mass_sum / self.measured if self.measured else None

    def as_dict(self) -> dict[str, Any]:
        """Fields and derived figures, JSON-able."""
        names = ("tokens_per_forward", "steps_per_block", "recall", "mass_kept")
        derived = {name: getattr(self, name) for name in names}
        return dataclasses.asdict(self) | derived

    def lines(self) -> list[str]:
        """The report that `--stats` prints."""
        rate = self.new_tokens / self.decode_seconds if self.decode_seconds else float("nan")
        report = [
            f"rows                {self.rows}",
            f"prompt tokens       {self.prompt_tokens}",
            f"new tokens          {self.new_tokens}",
            f"forwards            {self.forwards} ({self.denoise_steps} denoising, {self.commits} commits; "
            f"{self.batch_forwards} batched)",
            f"tokens per forward  {self.tokens_per_forward:.2f}",
            f"steps per block     {self.steps_per_block:.2f} over {self.blocks} blocks",
            f"prefill             {self.prefill_seconds:.3f} s",
            f"decode              {self.decode_seconds:.3f} s ({rate:.1f} tokens/s)",
            f"compilation         {self.compile_seconds:.3f} s",
            f"KV cache            {self.kv_bytes / 2**20:.1f} MiB",
        ]
        if self.edited_tokens:
            report.append(f"edited tokens       {self.edited_tokens}")
        if self.exact_forwards or self.offload is not None:
            report.append(
                f"sparse blocks       {self.sparse_blocks} of {self.blocks} ({self.exact_forwards} exact forwards)"
            )
        if self.recall is not None and self.mass_kept is not None:
            report.append(f"selection           recall {self.recall:.3f}, attention kept {self.mass_kept:.3f}")
        return report + (self.offload.lines() if self.offload is not None else [])


class Stopwatch:
    """Adds up what its spans (`with stopwatch:`) took of their thread's time, compilation apart.

    `seconds` is their wall time less the time for which the thread itself compiled, `compile_seconds` that time, which
    lies within it. What other threads compile meanwhile takes none of it, but where this one waits for them. Each span
    may be in another thread.
    """

    def __init__(self) -> None:
        self._wall = self._compiled = 0
        self._began = (0, 0)

    def __enter__(self) -> Stopwatch:
        now = time.perf_counter_ns()
        self._began = now, _compiling.until(now)
        return self

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter_ns()
        self._wall += now - self._began[0]
        self._compiled += _compiling.until(now) - self._began[1]

    @property
    def seconds(self) -> float:
        return (self._wall - self._compiled) / 1e9

    @property
    def compile_seconds(self) -> float:
        return self._compiled / 1e9


class _Compiling(threading.local):
    """For how long this thread has compiled, in ns of `time.perf_counter_ns`.

    JAX says when it begins and ends each part of it. Parts lie within others (a constant that is computed while a
    program is traced is compiled there), so only the outermost count. JAX's own durations are of a clock that may be
    set back.
    """

    total = 0
    depth = 0
    began = 0

    def until(self, now: int) -> int:
        return self.total + (now - self.began if self.depth else 0)


_compiling = _Compiling()


def _on_begin(event: str, value: float, **_: str | int) -> None:
    if event in _COMPILE_EVENTS:
        if not _compiling.depth:
            _compiling.began = time.perf_counter_ns()
        _compiling.depth += 1


def _on_end(event: str, duration_secs: float, **_: str | int) -> None:
    if event in _COMPILE_EVENTS and _compiling.depth:
        _compiling.depth -= 1
        if not _compiling.depth:
            _compiling.total += time.perf_counter_ns() - _compiling.began


# Tracing, lowering and XLA itself; all three are paid once per shape. Of each, JAX tells the time when it begins as a
# "scalar", in the thread that compiles, and the duration when it ends.
_COMPILE_EVENTS = frozenset(
    f"/jax/core/compile/{stage}_duration" for stage in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)
jax.monitoring.register_scalar_listener(_on_begin)
jax.monitoring.register_event_duration_secs_listener(_on_end)
