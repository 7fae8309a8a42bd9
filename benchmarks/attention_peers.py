"""What attention is compared with: PyTorch's SDPA from a process of its own, and jax.nn with folded groups."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp


def fold_groups(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """In jax.nn's layout `[B, T, K, D]`, the query heads of a group folded into T."""
    b, t, _, d = q.shape
    q = jnp.moveaxis(q.reshape(b, t, k.shape[1], -1, d), 3, 1).reshape(b, -1, k.shape[1], d)
    return q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)


class TorchPeers:
    """`benchmarks.torch_attention` in a process of its own, which gets ready while this one compiles.

    As a context manager: leaving it ends the process. Without `wanted` there is none, and no times.
    """

    def __init__(self, requests: list[dict[str, Any]], *, wanted: bool):
        self.requests = requests
        self.process: subprocess.Popen[str] | None = None
        if wanted:
            command = [sys.executable, "-m", "benchmarks.torch_attention"]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> TorchPeers:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def times(self) -> dict[str, dict[str, float | None]]:
        """Microseconds of PyTorch's backends by case."""
        if self.process is None:
            return {}
        printed, _ = self.process.communicate(json.dumps(self.requests))
        if self.process.returncode:
            raise RuntimeError(f"benchmarks.torch_attention failed with {self.process.returncode}")
        found: dict[str, dict[str, float | None]] = {}
        for line in printed.splitlines():
            found |= json.loads(line)
        return found
