"""`herald-convert SRC DST` = `python -m convert SRC DST`: convert a published checkpoint into a herald_jax one."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from convert.converter import Inspection, convert, human, inspect
from convert.hf import open_source
from herald_jax.config import DTYPES
from herald_jax.errors import HeraldError
from herald_jax.hf_config import Overrides
from herald_jax.hf_families import FAMILIES


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        prog="herald-convert",
        description="Convert a Hugging Face checkpoint (safetensors, PyTorch .bin) or a Llama GGUF file into one "
        "directory that herald_jax loads: parameters, configuration, tokenizer and provenance.",
    )
    p.add_argument("source", metavar="SRC", help="checkpoint directory, or a .safetensors, .bin or .gguf file")
    p.add_argument("destination", metavar="DST", nargs="?", help="directory to create (not needed with --dry-run)")
    p.add_argument("--dtype", choices=DTYPES, help="store the weights in this dtype (default: as config.json says)")
    p.add_argument("--dry-run", action="store_true", help="print the mapping and everything that would be wrong")
    p.add_argument(
        "--verify",
        action="store_true",
        help="afterwards compare logits with transformers in float32 (needs torch and transformers, and memory for "
        "both models)",
    )
    p.add_argument("--force", action="store_true", help="replace a checkpoint that is already at DST")
    flags = p.add_argument_group("values that config.json lacks, or states wrongly")
    flags.add_argument("--family", choices=list(FAMILIES), help="whose modelling code the checkpoint follows")
    flags.add_argument("--block-length", type=_positive, metavar="M", help="positions denoised together")
    flags.add_argument("--small-block", type=_positive, metavar="S", help="sub-block revealed together, divides M")
    flags.add_argument("--mask-token-id", type=_natural, metavar="ID", help="the token that stands for a hole")
    flags.add_argument(
        "--logit-alignment", choices=("same", "shifted"), help="which token logits at a position predict"
    )
    flags.add_argument("--first-canvas", choices=("all_masked", "seed_and_masks"), help="what a new block starts as")
    flags.add_argument(
        "--stop-token-ids", type=_ids, metavar="ID[,ID...]", help='ids that end a text, separated by commas, or "none"'
    )
    return p


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a non-negative integer")
    return int(text)


def _positive(text: str) -> int:
    if _natural(text) == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def _ids(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(_natural(part.strip()) for part in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 2 for anything the user can mend (one sentence on stderr); 130 when interrupted."""
    p = parser()
    args = p.parse_args(argv)
    if args.destination is None and not args.dry_run:
        p.error("DST is missing")
    overrides = Overrides(
        family=args.family,
        block_length=args.block_length,
        small_block=args.small_block,
        mask_token_id=args.mask_token_id,
        logit_alignment=args.logit_alignment,
        first_canvas=args.first_canvas,
        stop_token_ids=args.stop_token_ids,
        dtype=args.dtype,
    )
    _keep_freed_memory()
    # A polite kill cleans up like Ctrl-C; what a hard one leaves is removed by the next run.
    with _terminated_as_interrupt():
        try:
            if args.dry_run:
                return _dry_run(Path(args.source), overrides)
            report = convert(args.source, args.destination, overrides=overrides, force=args.force, progress=True)
            for note in report.notes:
                print(f"note: {note}", file=sys.stderr)
            print(f"wrote {args.destination}: {report}")
            if args.verify:
                from convert.verify import verify

                print(verify(args.source, args.destination))
        except (HeraldError, OSError) as error:
            print(f"error: {describe(error)}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted; nothing was left at the destination", file=sys.stderr)
            return 130
    return 0


def describe(error: Exception) -> str:
    """One sentence for an error a user can mend."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}; nothing was written"
    return str(error)


def _dry_run(source_path: Path, overrides: Overrides) -> int:
    source = open_source(source_path)
    try:
        found = inspect(source, overrides)
        _print_mapping(found)
        for note in source.notes + list(found.hf.notes if found.hf else ()):
            print(f"note: {note}")
    finally:
        source.close()
    for problem in found.problems:
        print(f"problem: {problem}")
    if found.problems:
        count = len(found.problems)
        print(f"error: {source_path} cannot be converted, {count} problem{'s' * (count > 1)}", file=sys.stderr)
        return 2
    print("no problems")
    return 0


def _print_mapping(found: Inspection) -> None:
    if found.plan is None or found.hf is None:
        return
    total = 0
    for path, leaf in found.plan.leaves.items():
        shape = ", ".join(map(str, leaf.spec.shape))
        named = [name if part == "all" else f"{name} ({part})" for part, (name, _) in leaf.sources.items()]
        if len(named) > 4:  # one tensor per expert: the first and the last say it
            named = [named[0], f"{len(named) - 2} more", named[-1]]
        print(f"{path} {leaf.spec.dtype.name}[{shape}] <- {' + '.join(named) or 'nothing'}")
        size = leaf.spec.dtype.itemsize
        for length in leaf.spec.shape:
            size *= length
        total += size
    for name, why in found.plan.ignored.items():
        print(f"{name} ignored: {why}")
    print(f"{len(found.plan.leaves)} parameters, {human(total)}")


def _keep_freed_memory() -> None:
    """Have glibc keep the memory of freed buffers for the next ones.

    Buffers of tens of megabytes come and go with every tensor; given back and fetched anew, the kernel clears each page
    again. Measured: half of the system time, and a peak that creeps up through several arenas. Elsewhere: no effect.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        trim_threshold, mmap_threshold, arena_max = -1, -3, -8  # <malloc.h>
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)
        mallopt(arena_max, 1)


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread: the host program owns the signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
