"""The conversion itself: source → rules → checkpoint, one parameter at a time."""

from __future__ import annotations

import datetime
import math
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tqdm

from convert.hf import open_source
from convert.mapping import EMBED, HEAD, LeafPlan, Plan, plan
from convert.source import Source, fingerprint, slabs
from herald_jax.checkpoint import SOURCE, TOKENIZER, CheckpointWriter, LeafSource, check_destination, versions
from herald_jax.config import ModelConfig
from herald_jax.errors import ConfigError, ConversionError
from herald_jax.hf_config import NO_OVERRIDES, HFConfig, Overrides, read_hf_config
from herald_jax.hf_files import CONFIG_FILES, TOKENIZER_FILES

_MISSING = re.compile(r" is missing( \(|$)")
_SHOWN = 60  # problems in one error message; `--dry-run` lists all


class SourceProblems(ConversionError):
    """A source that cannot be converted. `problems` has one sentence for each thing that is wrong with it."""

    def __init__(self, source: Path, problems: list[str]):
        self.problems = tuple(problems)
        if len(problems) == 1:
            super().__init__(f"{source} cannot be converted: {problems[0]}")
            return
        lines = [f"{source} cannot be converted, {len(problems)} problems:", *(f"  - {p}" for p in problems[:_SHOWN])]
        if len(problems) > _SHOWN:
            lines.append(f"  and {len(problems) - _SHOWN} more (--dry-run lists all)")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Inspection:
    """What would be converted, and everything that would be wrong. `hf`, `plan`: None if the config is unusable."""

    hf: HFConfig | None
    plan: Plan | None
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What a conversion did."""

    config: ModelConfig
    notes: tuple[str, ...]
    tensors: int
    bytes_written: int
    seconds: float

    def __str__(self) -> str:
        rate = self.bytes_written / self.seconds / 1e6
        return f"{self.tensors} tensors, {human(self.bytes_written)} in {self.seconds:.1f} s ({rate:.0f} MB/s)"


def human(count: float) -> str:
    """Bytes for people: "1.6 GB"."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def inspect(source: Source, overrides: Overrides) -> Inspection:
    """Everything about a source that can be known without converting it: configuration, mapping, all problems.

    Reads no tensor, except lm_head and embedding where both are present though tied: they must be equal.
    """
    problems = list(source.problems)
    try:
        hf = read_hf_config(source.config_dir, overrides)
    except ConfigError as error:
        return Inspection(None, None, (*problems, str(error)))
    mapping = plan(hf.config, source.tensors)
    # The damage of a file has been named; the absence of the tensors in it would only drown that.
    problems += [p for p in mapping.problems if not (_MISSING.search(p) and _is_lost(source, p.split(" ")[0]))]
    if mapping.compare_head and {HEAD, EMBED} <= source.tensors.keys() and not problems:
        problems += _compare_heads(source)
    return Inspection(hf, mapping, tuple(problems))


def _is_lost(source: Source, name: str) -> bool:
    return source.lost is None or name in source.lost


def _compare_heads(source: Source) -> list[str]:
    rows = 4096
    for number, (head, embed) in enumerate(zip(slabs(source, HEAD, rows), slabs(source, EMBED, rows), strict=True)):
        different = np.flatnonzero((head != embed).any(axis=1))
        if different.size:
            return [
                f"{HEAD} differs from {EMBED} (first in row {number * rows + int(different[0])}) although "
                "tie_word_embeddings is true; if the head is the checkpoint's own, set tie_word_embeddings to false in "
                "config.json"
            ]
    return []


def convert(
    source_path: str | Path,
    destination: str | Path,
    *,
    overrides: Overrides = NO_OVERRIDES,
    force: bool = False,
    progress: bool = False,
) -> Report:
    """Convert a checkpoint. The destination appears whole, at the end, or not at all.

    Args:
      source_path: directory, .safetensors, .bin or .gguf file.
      destination: directory to create.
      overrides: what the command's flags say.
      force: replace a checkpoint already at `destination`.
      progress: show a bar of tensors and bytes on stderr.
    Raises: SourceProblems with everything that is wrong with the source; ConversionError; CheckpointError for the
      destination; OSError, a full disk among them.
    """
    source_path, destination = Path(source_path), Path(destination)
    check_destination(destination.absolute(), force=force)
    source = open_source(source_path)
    try:
        found = inspect(source, overrides)
        if found.problems or found.hf is None or found.plan is None:
            raise SourceProblems(source_path, list(found.problems))
        return _write(source, source_path, destination, found.hf, found.plan, force=force, progress=progress)
    finally:
        source.close()


def _write(
    source: Source, source_path: Path, destination: Path, hf: HFConfig, mapping: Plan, *, force: bool, progress: bool
) -> Report:
    started = time.perf_counter()
    dtype = np.dtype(hf.config.dtype)
    leaves = {path: _leaf_source(source, leaf) for path, leaf in mapping.leaves.items()}
    total = sum(leaf.nbytes for leaf in leaves.values())
    _check_space(destination.absolute(), total)
    notes = (*source.notes, *hf.notes, *_dtype_notes(source, mapping, dtype))
    counts = {path: len(leaf.sources) for path, leaf in mapping.leaves.items()}
    bar = tqdm.tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="converting",
        disable=not progress,
        mininterval=0.2 if sys.stderr.isatty() else 10,
    )
    tensors = 0

    def on_leaf(path: str) -> None:
        nonlocal tensors
        tensors += counts[path]
        bar.set_postfix_str(f"{tensors}/{sum(counts.values())} tensors", refresh=False)

    with bar, CheckpointWriter(destination, force=force) as writer:
        writer.write_params(leaves, on_bytes=bar.update, on_leaf=on_leaf)
        present = [source.config_dir / name for name in TOKENIZER_FILES if (source.config_dir / name).is_file()]
        writer.copy_files(present, TOKENIZER)
        writer.copy_files(
            [source.config_dir / name for name in CONFIG_FILES if (source.config_dir / name).is_file()], SOURCE
        )
        if not present:
            notes = (*notes, "the source has no tokenizer files: the model takes and gives token ids only")
        provenance = {
            "source": str(source_path),
            "kind": source.kind,
            "files": [fingerprint(file) for file in source.files],
            "notes": list(notes),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(),
        }
        writer.commit(hf.config, provenance)
    return Report(hf.config, notes, tensors, total, time.perf_counter() - started)


def _leaf_source(source: Source, leaf: LeafPlan) -> LeafSource:
    dtype = np.dtype(leaf.spec.dtype)
    (name, transform), *_ = leaf.sources.values()
    if transform.write is None:

        def read(rows: int) -> Iterator[np.ndarray]:
            for slab in slabs(source, name, rows):
                yield cast(slab, dtype, name)

    elif transform.by_expert:

        def read(rows: int) -> Iterator[np.ndarray]:
            # A few experts at a time: all of a layer's are gigabytes in the largest models.
            for start in range(0, leaf.spec.shape[0], rows):
                slab = np.empty((min(rows, leaf.spec.shape[0] - start), *leaf.spec.shape[1:]), dtype)
                for part, (name, rule) in leaf.sources.items():
                    assert rule.write is not None
                    for expert in _experts_of(part, start, start + len(slab)):
                        tensor = _expert(source, name, expert if part == rule.part else None)
                        rule.write(slab[expert - start], cast(tensor, dtype, name))
                yield slab

    else:

        def read(rows: int) -> Iterator[np.ndarray]:
            # Fused and transposed parameters are one layer's: put together whole, then handed over in pieces.
            whole = np.empty(leaf.spec.shape, dtype)
            for part, rule in leaf.sources.values():
                assert rule.write is not None
                rule.write(whole, cast(source.rows(part, 0, source.tensors[part].shape[0]), dtype, part))
            for start in range(0, len(whole), rows):
                yield whole[start : start + rows]

    return LeafSource(leaf.spec.shape, dtype, read)


def _experts_of(part: str, start: int, stop: int) -> range:
    """Which of the experts `start` to `stop` a part of a leaf fills: its own ("gate 17"), or all ("gate")."""
    number = part.rpartition(" ")[2]
    if not number.isdigit():
        return range(start, stop)
    return range(max(int(number), start), min(int(number) + 1, stop))


def _expert(source: Source, name: str, expert: int | None) -> np.ndarray:
    """One expert's matrix: a row of a tensor of all experts, or (None) the whole of a tensor of its own."""
    if expert is None:
        return source.rows(name, 0, source.tensors[name].shape[0])
    return source.rows(name, expert, expert + 1)[0]


def cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """`array` in `dtype`. Raises ConversionError where a finite weight would become infinite."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        out = array.astype(dtype)
    if not np.isfinite(out).all() and np.isfinite(array).all():
        largest = float(np.max(np.abs(array.astype(np.float64))))
        raise ConversionError(f"{name} holds {largest:.4g}, beyond the range of {dtype.name}; choose another --dtype")
    return out


def _dtype_notes(source: Source, mapping: Plan, dtype: np.dtype) -> list[str]:
    # Leaves with a dtype of their own (a router's, always float32) are not what the user chose a dtype for.
    chosen = [leaf for leaf in mapping.leaves.values() if leaf.spec.dtype == dtype]
    stored = sorted({source.tensors[name].stored for leaf in chosen for name, _ in leaf.sources.values()})
    same = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    others = [s for s in stored if same.get(s) != dtype.name]
    return [f"weights stored as {', '.join(others)} were converted to {dtype.name}"] if others else []


def _check_space(destination: Path, needed: int) -> None:
    parent = destination.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ConversionError(
            f"{destination} needs {human(math.ceil(needed))}, but only {human(free)} are free there; "
            "choose a disk with more room"
        )
