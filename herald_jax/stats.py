"""What a run can report about itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


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
      prefill_seconds, decode_seconds: wall time, compilation excluded.
      compile_seconds: spent compiling during the call.
      kv_bytes: allocated KV cache, all devices together.
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
        rate = self.new_tokens / self.decode_seconds if self.decode_seconds > 0 else float("nan")
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
        if self.exact_forwards:
            report.append(
                f"sparse blocks       {self.sparse_blocks} of {self.blocks} ({self.exact_forwards} exact forwards)"
            )
        if self.recall is not None and self.mass_kept is not None:
            report.append(f"selection           recall {self.recall:.3f}, attention kept {self.mass_kept:.3f}")
        return report


class CompileClock:
    """Seconds this process has spent compiling since the clock was made."""

    def __init__(self) -> None:
        self._start = _compile_seconds[0]

    @property
    def seconds(self) -> float:
        return _compile_seconds[0] - self._start


_compile_seconds = [0.0]


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    if event in _COMPILE_EVENTS:
        _compile_seconds[0] += duration_secs


# Tracing, lowering and XLA itself; all three are paid once per shape.
_COMPILE_EVENTS = frozenset(
    f"/jax/core/compile/{stage}_duration" for stage in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)
jax.monitoring.register_event_duration_secs_listener(_on_duration)
