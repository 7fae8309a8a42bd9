"""Parts of pages that are made from results files and never typed: what stands between two markers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def replace_between(text: str, begin: str, end: str, made: str, *, page: str) -> str:
    """`text` with `made` between the markers. Raises ValueError, with `page` as its name, if they are missing."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the {page} lacks the markers {begin!r} and {end!r}")
    return f"{before}{begin}\n{made}{end}{after}"


def update(
    argv: Sequence[str] | None, path: Path, render: Callable[[str], str], *, name: str, module: str, description: str
) -> int:
    """The command `python -m MODULE`: rewrites the page at `path`, called `name`, or with --check compares it."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--check", action="store_true", help=f"change nothing; status 1 if {name} is out of date")
    args = parser.parse_args(argv)
    old = path.read_text(encoding="utf-8")
    new = render(old)
    if args.check:
        if new != old:
            print(f"{name} is out of date; run python -m {module}", file=sys.stderr)
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    return 0
