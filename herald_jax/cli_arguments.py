"""The flags of `herald-generate`, and the request that they describe; other commands take the groups they need."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from herald_jax import denoise
from herald_jax.config import DTYPES, GenerateConfig
from herald_jax.errors import GenerationError
from herald_jax.manifest import MANIFEST
from herald_jax.plans import Dense, Herald, Mage, Plan


def _own(plan: type[Plan]) -> dict[str, str]:
    """Every field of a plan has a flag of its name."""
    return {field.name: field.name for field in dataclasses.fields(plan)}


# Each plan and policy by name: how it is built, and which flags it takes under which of its own names.
PLANS: dict[str, tuple[Callable[..., Plan], dict[str, str]]] = {
    "dense": (Dense, _own(Dense)),
    "mage": (Mage, _own(Mage)),
    "herald": (Herald, _own(Herald)),
}
POLICIES: dict[str, tuple[Callable[..., denoise.Policy], dict[str, str]]] = {
    "static": (denoise.StaticLowConfidence, {"steps": "steps"}),
    "threshold": (denoise.Threshold, {"steps": "steps", "threshold": "threshold"}),
    "entropy-bound": (denoise.EntropyBound, {"steps": "steps", "entropy_bound": "bound"}),
    "sequential": (denoise.Sequential, {"steps": "steps"}),
}


class CommandParser(argparse.ArgumentParser):
    """argparse, with errors in the form all of ours have."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def fail(error: Exception | str) -> int:
    """Report what a user can mend, in one sentence; returns the exit status for it."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        error = f"{error.filename}: {error.strerror}"
    print(f"error: {error}", file=sys.stderr)
    return 2


def out_of_memory(error: Exception, remedy: str) -> int:
    """`fail` where a device had no room, with what to do about it. Any other `error` is raised again."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    return fail(f"the device ran out of memory; {remedy}")


def interrupted(sentence: str, argv: Sequence[str] | None) -> int:
    """Report that the user has stopped the command; returns the exit status for it.

    A process of its own (`argv` None) ends here instead, without Python's and JAX's last duties: XLA goes on compiling
    what nobody waits for any more, and that of JAX 0.10 crashes where the interpreter takes its devices away meanwhile.
    """
    print(f"\n{sentence}", file=sys.stderr)
    if argv is None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(130)
    return 130


def settings(args: argparse.Namespace, ignored: Collection[str], files: Iterable[str | None]) -> dict[str, Any]:
    """What a result depends on: the flags but for some, and what is in the checkpoint and in the named files."""
    given = {name: value for name, value in vars(args).items() if name not in ignored and value is not None}
    read = [*filter(None, files), str(Path(args.checkpoint) / MANIFEST)]
    return given | {f"content of {file}": hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] for file in read}


def differing(settings: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Names of the settings that two runs do not have in common."""
    return sorted(name for name in settings.keys() | others.keys() if settings.get(name) != others.get(name))


def add_running(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say how a model runs."""
    group = parser.add_argument_group("running")
    group.add_argument("--dtype", choices=DTYPES, help="to compute in (default: the checkpoint's)")
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts at a time (default %(default)s)")
    group.add_argument("--devices", type=int, default=1, metavar="N", help="spread the model over N devices")


def parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = CommandParser(prog="herald-generate", description="Generate text with a converted checkpoint.")
    parser.add_argument("checkpoint", help="directory written by herald-convert")
    parser.add_argument("prompt", nargs="?", help="the prompt; without it and --file, standard input is the prompt")

    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--file",
        metavar="F",
        help="a prompt on each line ('-': standard input); in a .jsonl file each line is a JSON string, "
        'or an object with "prompt" or "messages"',
    )
    group.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="apply the checkpoint's chat template (default: if it has one)",
    )
    group.add_argument("--system", metavar="TEXT", help="a system message before each prompt")

    add_decoding(parser)
    add_plan(parser)

    add_running(parser)

    group = parser.add_argument_group("output")
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="write each block as soon as it is finished (default: if the output is a terminal)",
    )
    group.add_argument("--json", action="store_true", help="one JSON object a line: index, text, tokens, finish_reason")
    group.add_argument("--output", metavar="F", help="file to write, whole or not at all, instead of standard output")
    group.add_argument("--stats", action="store_true", help="report forwards, tokens per forward, times and KV bytes")
    return parser


def add_decoding(parser: argparse.ArgumentParser) -> None:
    """The flags of `GenerateConfig`; those of one policy default to None, so that it is known which were given."""
    defaults = GenerateConfig()
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--max-new-tokens", type=int, default=defaults.max_new_tokens, metavar="N", help="default %(default)s"
    )
    group.add_argument(
        "--policy", choices=POLICIES, default="threshold", help="which positions a step reveals (default %(default)s)"
    )
    group.add_argument("--steps", type=int, metavar="N", help="denoising steps per block (default: one per position)")
    group.add_argument(
        "--threshold",
        type=float,
        metavar="P",
        help=f"confidence that reveals a position (default {denoise.Threshold().threshold})",
    )
    group.add_argument(
        "--entropy-bound",
        type=float,
        metavar="NATS",
        help=f"summed entropy of a step (default {denoise.EntropyBound().bound})",
    )
    group.add_argument(
        "--editing-threshold",
        type=float,
        metavar="P",
        help="LLaDA2.1's token editing: confidence that rewrites a token of the block; 0 rewrites whatever disagrees "
        "(default: no editing)",
    )
    group.add_argument(
        "--max-post-steps",
        type=int,
        metavar="N",
        help=f"editing: most steps after a block's last mask (default {denoise.Editing().max_post_steps})",
    )
    group.add_argument(
        "--temperature", type=float, default=defaults.temperature, metavar="T", help="0, the default, is greedy"
    )
    group.add_argument("--top-k", type=int, default=defaults.top_k, metavar="K", help="0, the default, is off")
    group.add_argument("--top-p", type=float, default=defaults.top_p, metavar="P", help="1, the default, is off")
    group.add_argument("--seed", type=int, default=defaults.seed, metavar="N", help="of sampling (default %(default)s)")
    group.add_argument("--block-cache", action="store_true", help="Fast-dLLM v2's cache of sub-blocks")


def _share_or_auto(text: str) -> float | str:
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a fraction nor auto") from None


def _layers(text: str) -> list[int]:
    # A list, as JSON gives it back: a journal's settings are compared with these.
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers, such as 2,6") from None


def add_plan(parser: argparse.ArgumentParser) -> None:
    """The flags of the plans; those of one plan default to None."""
    group = parser.add_argument_group("plan")
    group.add_argument("--plan", choices=PLANS, default="dense", help="attention over the prefix (default %(default)s)")
    group.add_argument(
        "--budget",
        type=count_or_fraction,
        metavar="B",
        help="mage, herald: prefix entries a block may attend to, 512 or 0.05",
    )
    group.add_argument("--min-budget", type=int, metavar="N", help="mage, herald: at least so many entries")
    group.add_argument("--sinks", type=int, metavar="N", help="mage, herald: first entries that are always chosen")
    group.add_argument("--recent", type=int, metavar="N", help="mage, herald: last entries that are always chosen")
    group.add_argument(
        "--query", metavar="Q", help="mage, herald: whose attention selects: all, center, first, last; herald also mean"
    )
    group.add_argument("--reduce", metavar="R", help="mage, herald: mean or max over those queries")
    group.add_argument(
        "--normalise", metavar="W", help="mage: over what attention adds up to 1: prefix+block, or prefix alone"
    )
    group.add_argument(
        "--allocate", metavar="A", help="mage: the budget of a layer: uniform, or layer_adaptive where more is needed"
    )
    group.add_argument(
        "--layer-spread", type=float, metavar="F", help="mage: layer_adaptive: at most so many times the budget"
    )
    group.add_argument(
        "--dense-layers", type=int, metavar="N", help="mage, herald: leading layers that attend to everything"
    )
    group.add_argument("--page-size", type=int, metavar="N", help="mage, herald: choose pages of so many entries")
    group.add_argument("--select-at-step", type=int, metavar="N", help="mage: the denoising step that selects")
    group.add_argument("--select-every", type=int, metavar="N", help="mage: blocks that share one selection")
    group.add_argument(
        "--rest", metavar="R", help="mage: keep or drop what the selecting step found in entries that were not selected"
    )
    group.add_argument(
        "--selector",
        metavar="S",
        help="mage: mage, or a baseline: oracle, quest, tidal, random, recent; herald: cpu, index, split or auto",
    )
    group.add_argument(
        "--reselect-layers", type=_layers, metavar="L,L", help="mage: layers at which the selector tidal selects anew"
    )
    group.add_argument(
        "--measure",
        action="store_const",
        const=True,
        help="with --stats, mage: report recall and kept attention; herald: how long fetching took and what hid it",
    )
    group.add_argument(
        "--draft", action=argparse.BooleanOptionalAction, help="herald: select while the block before is written"
    )
    group.add_argument(
        "--draft-at", type=_share_or_auto, metavar="F", help="herald: share of the block revealed at the draft, or auto"
    )
    group.add_argument("--scan", metavar="S", help="herald: native, xla or auto: what scans the keys on the CPU")
    group.add_argument("--index-bits", type=int, metavar="N", help="herald: 8 or 4, of the index on the device")
    group.add_argument("--split", type=float, metavar="F", help="herald: share of the layers that 'split' indexes")
    group.add_argument(
        "--reuse", action=argparse.BooleanOptionalAction, help="herald: do not fetch again what the last pool held"
    )
    group.add_argument(
        "--keep-bonus", type=float, metavar="F", help="herald: by so much what the last pool held scores higher"
    )


def count_or_fraction(text: str) -> int | float:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of entries nor a fraction") from None


def _build(kind: str, table: Mapping[str, tuple[Callable[..., Any], dict[str, str]]], args: argparse.Namespace) -> Any:
    """The plan or policy that the flags describe. Raises GenerationError for a flag that belongs to another one."""
    name = getattr(args, kind)
    build, takes = table[name]
    for flag in dict.fromkeys(flag for _, flags in table.values() for flag in flags):
        if flag not in takes and getattr(args, flag) is not None:
            owners = [owner for owner, (_, flags) in table.items() if flag in flags]
            raise GenerationError(
                f"{flag_of(flag)} belongs to --{kind} {' and '.join(owners)}, but the {kind} is {name}"
            )
    return build(**{own: getattr(args, flag) for flag, own in takes.items() if getattr(args, flag) is not None})


def build_request(args: argparse.Namespace) -> tuple[GenerateConfig, Plan]:
    """What to generate, and how. Raises GenerationError for values and combinations that make no sense."""
    config = GenerateConfig(
        max_new_tokens=args.max_new_tokens,
        policy=_build_policy(args),
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        block_cache=args.block_cache,
    )
    return config, build_plan(args)


def _build_policy(args: argparse.Namespace) -> denoise.Policy:
    fill = _build("policy", POLICIES, args)
    if args.editing_threshold is None:
        if args.max_post_steps is not None:
            raise GenerationError("--max-post-steps belongs to token editing: give --editing-threshold too")
        return fill
    more = {} if args.max_post_steps is None else {"max_post_steps": args.max_post_steps}
    return denoise.Editing(fill, args.editing_threshold, **more)


def build_plan(args: argparse.Namespace) -> Plan:
    """The plan that `add_plan`'s flags describe. Raises GenerationError as `build_request` does.

    A flag that changes nothing beside the others is refused, though the plan's field may be set.
    """
    for plan, flag, other, values in (
        ("mage", "layer_spread", "allocate", ("layer_adaptive",)),
        ("herald", "split", "selector", ("split",)),
        ("herald", "index_bits", "selector", ("index", "split", "auto")),
        ("herald", "scan", "selector", ("cpu", "split", "auto")),
    ):
        chosen = getattr(args, other) or getattr(PLANS[plan][0], other)
        if args.plan == plan and getattr(args, flag) is not None and chosen not in values:
            raise GenerationError(
                f"{flag_of(flag)} has a meaning only with {flag_of(other)} {' or '.join(values)}: give that too"
            )
    for flag, what in (
        ("draft_at", "says when the draft is made"), ("selector", "says who scores the draft's keys"),
        ("scan", "says what scans for the draft"),
    ):  # fmt: skip
        if args.plan == "herald" and args.draft is False and getattr(args, flag) is not None:
            raise GenerationError(f"{flag_of(flag)} {what}, but --no-draft makes none")
    return _build("plan", PLANS, args)


def flag_of(name: str) -> str:
    """How the user writes the argument that the parser calls `name`."""
    return f"--{name.replace('_', '-')}"
