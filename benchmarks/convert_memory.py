"""Peak memory and speed of a conversion against the checkpoint's size: `python -m benchmarks.convert_memory`.

For each size a checkpoint of random bfloat16 weights is written, dropped from the page cache, and converted in a
process of its own; its peak resident set is the kernel's high-water mark (VmHWM, anonymous and mapped pages together).
Beside each conversion stand the two things the disk must do for it, measured in the same directory: reading the source
once, and writing the same number of bytes with fsync.

`--full` adds the shape of SDAR-8B (16.4 GB; needs 34 GB of disk for a few minutes). Writes results/convert-cpu.json,
the plot docs/img/convert_memory.png (needs matplotlib) and the table in docs/conversion.md. `--draw` only redraws.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, output_option, print_rows, row, write_results
from benchmarks.generated import replace_between

ROOT = Path(__file__).parent.parent
DOC = ROOT / "docs" / "conversion.md"
PLOT = ROOT / "docs" / "img" / "convert_memory.png"
BEGIN, END = "<!-- measured: begin (made by `python -m benchmarks.convert_memory`) -->", "<!-- measured: end -->"
LIMIT_GB = 3.0  # for a checkpoint of 16 GB


@dataclass(frozen=True)
class Shape:
    """A Qwen3-shaped checkpoint with an untied head."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    layers: int
    head_dim: int = 128

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["SDARForCausalLM"],
            "model_type": "sdar",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "rope_scaling": None,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "block_size": 4,
            "mask_token_id": self.vocab - 1,
            "eos_token_id": 0,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        e, f, d = self.hidden, self.intermediate, self.head_dim
        q, kv = self.heads * d, self.kv_heads * d
        yield "model.embed_tokens.weight", (self.vocab, e)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            yield f"{layer}input_layernorm.weight", (e,)
            for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
                yield f"{layer}self_attn.{name}.weight", (rows, e)
            yield f"{layer}self_attn.o_proj.weight", (e, q)
            yield f"{layer}self_attn.q_norm.weight", (d,)
            yield f"{layer}self_attn.k_norm.weight", (d,)
            yield f"{layer}post_attention_layernorm.weight", (e,)
            yield f"{layer}mlp.gate_proj.weight", (f, e)
            yield f"{layer}mlp.up_proj.weight", (f, e)
            yield f"{layer}mlp.down_proj.weight", (e, f)
        yield "model.norm.weight", (e,)
        yield "lm_head.weight", (self.vocab, e)


# SDAR-1.7B's layers under a small vocabulary, so that the sizes differ in depth only; then SDAR-8B itself.
LADDER = {f"{layers}-layers": Shape(2048, 6144, 16, 8, 32768, layers) for layers in (1, 4, 9, 19, 38)}
FULL = {"sdar-8b": Shape(4096, 12288, 32, 8, 151936, 36)}


def write_checkpoint(directory: Path, shape: Shape, shard_bytes: int = 4_000_000_000) -> int:
    """Write the checkpoint in shards of at most `shard_bytes`; returns its size in bytes. Holds one small buffer."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(shape.config()))
    shards: list[list[tuple[str, tuple[int, ...], int]]] = [[]]
    filled = total = 0
    for name, dims in shape.tensors():
        nbytes = 2 * int(np.prod(dims))
        if filled and filled + nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, dims, nbytes))
        filled += nbytes
        total += nbytes
    # Random bits with a small exponent: finite bfloat16 numbers, and nothing a disk could compress away.
    noise = np.random.default_rng(0).integers(0, 2**16, 1 << 22, dtype=np.uint16) & np.uint16(0xBF7F)
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        header: dict[str, Any] = {}
        offset = 0
        for name, dims, nbytes in shard:
            header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
            weight_map[name] = file
        raw = json.dumps(header).encode()
        with (directory / file).open("wb", buffering=0) as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            _write_bytes(out.fileno(), noise, offset)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def _write_bytes(descriptor: int, noise: np.ndarray, count: int) -> None:
    view = noise.view(np.uint8).data
    while count:
        count -= os.write(descriptor, view[: min(count, len(view))])
    os.fsync(descriptor)


def _drop_from_cache(directory: Path) -> None:
    """Tell the kernel that these files' pages are not needed, so that the next read comes from the disk."""
    for file in directory.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_seconds(directory: Path) -> float:
    """Seconds to read every weight file once, cold, in pieces of 64 MB."""
    _drop_from_cache(directory)
    buffer = bytearray(64 << 20)
    start = time.perf_counter()
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - start


def write_seconds(path: Path, count: int) -> float:
    """Seconds to write `count` bytes in files of 64 MB, each flushed, and remove them again (not counted)."""
    noise = np.random.default_rng(1).integers(0, 2**16, 1 << 22, dtype=np.uint16)
    path.mkdir()
    start = time.perf_counter()
    for i in range(-(-count // (64 << 20))):
        with (path / str(i)).open("wb") as out:
            _write_bytes(out.fileno(), noise, min(64 << 20, count - i * (64 << 20)))
    taken = time.perf_counter() - start
    shutil.rmtree(path)
    return taken


_CHILD = """
import sys, time
from convert.__main__ import main
def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
before, start, cpu = peak(), time.perf_counter(), time.process_time()
code = main(sys.argv[1:3])
print(time.perf_counter() - start, before * 1024, peak() * 1024, time.process_time() - cpu)
sys.exit(code)
"""


def convert_in_child(source: Path, target: Path) -> tuple[float, int, int, float]:
    """Convert in a new process. Returns seconds, peak resident bytes before (imports alone) and after, CPU seconds."""
    command = [sys.executable, "-c", _CHILD, str(source), str(target)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    seconds, before, after, cpu = done.stdout.splitlines()[-1].split()
    return float(seconds), int(before), int(after), float(cpu)


def measure(name: str, shape: Shape, folder: Path) -> dict[str, Any]:
    """One size: write it, time the disk alone, convert it, remove it. Bytes and seconds."""
    work = Path(tempfile.mkdtemp(prefix="herald-convert-memory-", dir=folder))
    try:
        size = write_checkpoint(work / "hf", shape)
        read, write = read_seconds(work / "hf"), write_seconds(work / "floor", min(size, 4_000_000_000))
        write *= size / min(size, 4_000_000_000)
        _drop_from_cache(work / "hf")
        load = os.getloadavg()[0]
        seconds, before, peak, cpu = convert_in_child(work / "hf", work / "out")
        return {
            "name": name,
            "bytes": size,
            "peak": peak,
            "imports": before,
            "seconds": seconds,
            "cpu_seconds": cpu,
            "load": load,
            "read_seconds": read,
            "write_seconds": write,
            "largest_tensor": max(2 * int(np.prod(dims)) for _, dims in shape.tensors()),
        }
    finally:
        shutil.rmtree(work)


def rows_of(points: Sequence[dict[str, Any]], full: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results rows: each size, and the slope over those that differ in depth only."""
    rows = []
    for p in (*points, *full):
        goal = f"<={LIMIT_GB}" if p in full else None
        detail = {
            "checkpoint_gb": p["bytes"] / 1e9,
            "imports_alone_gb": p["imports"] / 1e9,
            "largest_tensor_gb": p["largest_tensor"] / 1e9,
            "seconds": p["seconds"],
            "mb_per_s": p["bytes"] / p["seconds"] / 1e6,
            "cpu_seconds": p["cpu_seconds"],
            "load_average_before": p["load"],
            "disk_reads_it_in_s": p["read_seconds"],
            "disk_writes_it_in_s": p["write_seconds"],
        }
        rows.append(row(f"memory/{p['name']}/peak_rss", p["peak"] / 1e9, "GB", goal=goal, detail=detail))
        floor = max(p["read_seconds"], p["write_seconds"])
        rows.append(row(f"memory/{p['name']}/time_over_disk", p["seconds"] / floor, "x"))
    slope, start = fit(points)
    rows.append(row("memory/slope", slope * 1e3, "MB/GB", detail={"intercept_gb": start}))
    return rows


def fit(points: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Least squares of peak GB over checkpoint GB: (slope, intercept)."""
    x = np.array([p["bytes"] / 1e9 for p in points])
    y = np.array([p["peak"] / 1e9 for p in points])
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


# -- plot and document, from the results file --------------------------------------------------------------------------


def load_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of results/convert-cpu.json, [] if there is none."""
    path = folder / "convert-cpu.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Peak memory over checkpoint size, with the checkpoint's own size for comparison."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    peaks = [r for r in rows if r["id"].endswith("/peak_rss")]
    x, y = ([r["detail"]["checkpoint_gb"] for r in peaks], [r["value"] for r in peaks])
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([0, 17], [0, 17], color="0.7", linestyle="--", label="the whole checkpoint in memory")
    axes.axhline(LIMIT_GB, color="tab:red", linewidth=1, label=f"limit for 16 GB: {LIMIT_GB:g} GB")
    axes.plot(x, y, "o-", color="tab:blue", label="peak resident memory, measured")
    axes.set(xlabel="checkpoint (GB)", ylabel="GB", xlim=(0, 17), ylim=(0, 6), title="Memory of a conversion")
    axes.legend(loc="upper left", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of the measured sizes and the slope."""
    lines = [
        "| checkpoint | peak memory | conversion | rate | processor time | the disk alone: read | write | load |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        if r["id"].endswith("/peak_rss"):
            d = r["detail"]
            lines.append(
                f"| {d['checkpoint_gb']:.2f} GB | {r['value']:.2f} GB | {d['seconds']:.1f} s "
                f"| {d['mb_per_s']:.0f} MB/s | {d['cpu_seconds']:.1f} s | {d['disk_reads_it_in_s']:.1f} s "
                f"| {d['disk_writes_it_in_s']:.1f} s | {d['load_average_before']:.0f} |"
            )
    by_id = {r["id"]: r for r in rows}
    slope = by_id["memory/slope"]
    lines += [
        "",
        f"Slope over the sizes that differ in depth only: {slope['value']:.1f} MB of peak memory per GB of checkpoint, "
        f"on {slope['detail']['intercept_gb']:.2f} GB. What remains depends on the largest layer parameter and on "
        "Python and JAX themselves.",
    ]
    return "\n".join(lines) + "\n"


def render(document: str, rows: Sequence[dict[str, Any]]) -> str:
    """The document with its measured part brought up to date. Raises ValueError if the markers are missing."""
    return replace_between(document, BEGIN, END, table(rows), page="document")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convert_memory", description=__doc__)
    parser.add_argument("--full", action="store_true", help="also convert a checkpoint of SDAR-8B's shape (16.4 GB)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints are made")
    parser.add_argument("--draw", action="store_true", help="only redraw the plot and the table from the results file")
    output_option(parser)
    args = parser.parse_args(argv)
    if not args.draw:
        points = [measure(name, shape, args.folder) for name, shape in LADDER.items()]
        full = [measure(name, shape, args.folder) for name, shape in FULL.items()] if args.full else []
        rows = rows_of(points, full)
        write_results("convert", rows, folder=args.out)
        print_rows(rows)
    if args.out is None:
        rows = load_rows(RESULTS)
        draw(rows, PLOT)
        DOC.write_text(render(DOC.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
