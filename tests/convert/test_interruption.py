"""What a conversion may not do to its destination, to the disk and to memory, however it ends."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert.converter import convert
from herald_jax.checkpoint import load_checkpoint
from herald_jax.errors import CheckpointError, ConversionError
from herald_jax.model import flatten
from tests.convert.checkpoints import CONFIG, config_without, tensors, write

ROOT = Path(__file__).parents[2]


def load(path: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in flatten(load_checkpoint(path).params).items()}


def test_the_destination_is_checked_before_the_source_is_read(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", CONFIG)
    convert(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        convert(tmp_path / "absent", tmp_path / "out")
    with pytest.raises(CheckpointError, match="is not empty and not a herald_jax checkpoint"):
        convert(source, source, force=True)
    arrays = tensors(CONFIG, seed=1)
    convert(write(tmp_path / "hf2", CONFIG, arrays), tmp_path / "out", force=True)
    np.testing.assert_array_equal(load(tmp_path / "out")["norm/scale"], arrays["model.norm.weight"])


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "hf", CONFIG)
    monkeypatch.setattr("convert.converter.shutil.disk_usage", lambda path: _Usage())
    with pytest.raises(ConversionError) as caught:
        convert(source, tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path / 'out'} needs 8.0 kB, but only 1.0 kB are free there; choose a disk with more room"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


class _Usage:
    free = 1000


def test_a_disk_that_fills_up_while_converting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "hf", CONFIG)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    monkeypatch.setattr("herald_jax.publish.os.fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        convert(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


CHILD = """
    import os, resource, signal, sys
    import numpy as np
    from convert import hf
    from convert.__main__ import main

    number, at = int(sys.argv[3]), int(sys.argv[4])
    reads = 0
    rows = hf.SafetensorsSource.rows

    def counted(self, *args):
        global reads
        reads += 1
        if reads == at:
            os.kill(os.getpid(), number)
        return rows(self, *args)

    hf.SafetensorsSource.rows = counted
    sys.exit(main(sys.argv[1:3]))
"""


@pytest.mark.parametrize(("signal_number", "code"), [(9, -9), (15, 130), (2, 130)], ids=["KILL", "TERM", "INT"])
def test_an_interrupted_conversion_leaves_nothing_complete_and_can_be_rerun(
    tmp_path: Path, signal_number: int, code: int
) -> None:
    source = write(tmp_path / "hf", CONFIG)
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(CHILD),
        str(source),
        str(tmp_path / "out"),
        str(signal_number),
        "12",
    ]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)
    assert child.returncode == code, child.stderr
    remains = sorted(p.name for p in tmp_path.iterdir() if p.name != "hf")
    if signal_number == 9:
        assert len(remains) == 1
        assert remains[0].startswith(".out.partial-")
    else:
        assert remains == []
        assert child.stderr.splitlines()[-1] == "interrupted; nothing was left at the destination"
    convert(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]
    np.testing.assert_array_equal(load(tmp_path / "out")["norm/scale"], tensors(CONFIG)["model.norm.weight"])


MEMORY = """
    import sys
    from convert.converter import convert
    from herald_jax import checkpoint

    checkpoint.CHUNK_BYTES, checkpoint.IN_FLIGHT_BYTES = 4 << 20, 8 << 20
    def peak():  # kB; not ru_maxrss, which begins with the parent's
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

    before = peak()
    convert(sys.argv[1], sys.argv[2])
    print((peak() - before) // 1024)
"""


def test_memory_is_bounded_by_tensors_not_by_the_checkpoint(tmp_path: Path) -> None:
    """140 MB in 20 layers, chunks of 4 MB; the largest parameter, copied in chunks, has 20 MB.

    benchmarks/convert_memory.py draws the whole curve, in a process like a user's.
    """
    config = config_without(
        hidden_size=512,
        intermediate_size=1024,
        head_dim=64,
        num_hidden_layers=20,
        num_attention_heads=8,
        vocab_size=20000,
    )
    source = write(tmp_path / "hf", config, {n: np.zeros(a.shape, a.dtype) for n, a in zeros(config).items()})
    assert (source / "model.safetensors").stat().st_size > 130e6
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), str(source), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=ROOT,
    )
    assert int(child.stdout) < 90


def zeros(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """`tensors`' names and shapes without drawing numbers."""
    small = tensors({**config, "hidden_size": 2, "intermediate_size": 3, "vocab_size": 5, "head_dim": 2})
    sizes = {
        2: config["hidden_size"],
        3: config["intermediate_size"],
        5: config["vocab_size"],
        2 * config["num_attention_heads"]: config["num_attention_heads"] * config["head_dim"],
        2 * config["num_key_value_heads"]: config["num_key_value_heads"] * config["head_dim"],
    }
    out = {}
    for name, array in small.items():
        shape = tuple(sizes[n] for n in array.shape)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            shape = (config["head_dim"],)
        out[name] = np.zeros(shape, ml_dtypes.bfloat16)
    return out
