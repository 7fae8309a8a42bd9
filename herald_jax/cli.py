"""`herald-generate`: answers on the command line.

The answers go to standard output (or a file), everything else (progress, statistics, errors) to standard error. Exit
status: 0 done; 1 the model itself failed on a prompt; 2 the request was wrong, said in one sentence; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from tqdm import tqdm

from herald_jax.cli_arguments import build_request, fail, flag_of, interrupted, out_of_memory, parser
from herald_jax.config import GenerateConfig
from herald_jax.errors import GenerationError, HeraldError
from herald_jax.generate import BlockEvent, stream
from herald_jax.loading import Model, load
from herald_jax.plans import Plan
from herald_jax.publish import opened, whole_file
from herald_jax.request import check_request
from herald_jax.sharding import make_mesh
from herald_jax.stats import OffloadStats, Stats


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text, or a conversation that only a chat template can render.

    Attributes:
      text: the user's words; of a conversation, those of its last message.
      messages: the conversation, or None for a plain text.
    """

    text: str
    messages: list[dict[str, Any]] | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status and never raises for what a user can cause."""
    args = parser().parse_args(argv)
    try:
        return _run(args)
    except BrokenPipeError:
        # Whoever read our output has seen enough (`| head`). Python would complain once more when it closes the stream.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return interrupted("interrupted", argv)
    except (HeraldError, OSError) as error:
        return fail(error)
    except jax.errors.JaxRuntimeError as error:
        return out_of_memory(error, "lower --batch-size or --max-new-tokens, or spread the model (--devices)")


def _run(args: argparse.Namespace) -> int:
    config, plan = build_request(args)
    for name in ("batch_size", "devices"):
        if getattr(args, name) < 1:
            raise GenerationError(f"{flag_of(name)} is {getattr(args, name)}, but at least 1 was expected")
    prompts = _read_prompts(args)
    with _output(args.output) as out:
        model = load(
            args.checkpoint, dtype=args.dtype, mesh=make_mesh(model=args.devices) if args.devices > 1 else None
        )
        ids = _encode(model, prompts, chat=args.chat, system=args.system)
        # All requests are checked before the first is run: a bad one at the end must not cost the work before it.
        check_request(model.config, config, plan, ids)

        live = args.stream if args.stream is not None else args.output is None and not args.json and out.isatty()
        stops = config.stop_token_ids or model.config.diffusion.stop_token_ids
        writer = _Writer(out, prompts, stops, live=live, as_json=args.json)
        # A live answer is its own progress report.
        with _Progress(len(ids), config.max_new_tokens, enabled=not live) as progress:
            stats = _generate(model, ids, config, plan, args.batch_size, [writer.add, progress.add])
        if args.stats and args.json:
            print(json.dumps({"stats": stats.as_dict()}), file=out)
    if args.stats and not args.json:
        print("\n".join(stats.lines()), file=sys.stderr)
    for sentence in writer.errors.values():
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if writer.errors else 0


def _read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Raises GenerationError when there is none, or one is empty or malformed; OSError for an unreadable file."""
    if args.prompt is not None and args.file is not None:
        raise GenerationError("a prompt and --file were both given, but only one of them can be used")
    if args.prompt is not None:
        prompts = [Prompt(args.prompt)]
    elif args.file is not None:
        source, lines = args.file, _decoded(args.file).split("\n")
        parse = _json_prompt if source.endswith(".jsonl") else lambda line, where: Prompt(line.removesuffix("\r"))
        prompts = [parse(line, f"line {i} of {source}") for i, line in enumerate(lines, start=1) if line.strip()]
        if not prompts:
            raise GenerationError(f"{source} holds no prompt")
    elif sys.stdin is None or sys.stdin.isatty():
        raise GenerationError("no prompt: give it as an argument, with --file, or on standard input")
    else:
        prompts = [Prompt(_decoded("-").removesuffix("\n"))]
    for index, prompt in enumerate(prompts):
        if not prompt.text.strip():
            raise GenerationError("the prompt is empty" if len(prompts) == 1 else f"prompt {index} is empty")
    return prompts


def _decoded(source: str) -> str:
    data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        name = "standard input" if source == "-" else source
        raise GenerationError(f"{name} is not UTF-8 text (byte {error.start})") from error


def _json_prompt(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise GenerationError(f"{where} is not JSON: {error}") from error
    if isinstance(value, str):
        return Prompt(value)
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return Prompt(value["prompt"])
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
        return Prompt(str(messages[-1].get("content", "")), messages)
    raise GenerationError(f'{where} is neither a JSON string nor an object with "prompt" or "messages"')


def _encode(model: Model, prompts: list[Prompt], *, chat: bool | None, system: str | None) -> list[list[int]]:
    """Token ids of each prompt. chat=None applies the checkpoint's template if there is one."""
    tokenizer = model.tokenizer
    chat = tokenizer.chat_template is not None if chat is None else chat
    if not chat:
        unusable = "--system" if system is not None else "a conversation" if any(p.messages for p in prompts) else None
        if unusable is not None:
            why = "--no-chat was given" if tokenizer.chat_template is not None else "the checkpoint has none"
            raise GenerationError(f"{unusable} needs a chat template, but {why}")
        return [tokenizer.encode(prompt.text) for prompt in prompts]
    start = [] if system is None else [{"role": "system", "content": system}]
    return [tokenizer.encode_chat(start + (p.messages or [{"role": "user", "content": p.text}])) for p in prompts]


def _generate(
    model: Model,
    ids: list[list[int]],
    config: GenerateConfig,
    plan: Plan,
    batch_size: int,
    listeners: Sequence[Callable[[int, BlockEvent], None]],
) -> Stats:
    """Run all prompts, `batch_size` at a time, and tell the listeners (index of the prompt, event) of every block."""
    total: list[Stats] = []
    # A prompt's random numbers depend on its place among all prompts, not on how they are cut into batches.
    keys = jax.vmap(lambda index: jax.random.fold_in(jax.random.key(config.seed), index))(np.arange(len(ids)))
    for start in range(0, len(ids), batch_size):
        rows = slice(start, start + batch_size)
        for event in stream(model, ids[rows], config, plan, keys=keys[rows]):
            if isinstance(event, Stats):
                total.append(event)
                continue
            for listener in listeners:
                listener(start + event.row, event)
    return _sum(total)


def _sum(parts: list[Stats]) -> Stats:
    """Counts and times add up; the KV cache of one batch is gone before the next."""
    names = [f.name for f in dataclasses.fields(Stats) if f.name != "offload"]
    fields: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in names}
    fields["kv_bytes"] = max(part.kv_bytes for part in parts)
    if offloads := [part.offload for part in parts if part.offload is not None]:
        said = {name: getattr(offloads[-1], name) for name in ("selector", "scanned_by")}
        names = [f.name for f in dataclasses.fields(OffloadStats) if f.name not in said]
        counts = {name: [getattr(offload, name) for offload in offloads] for name in names}
        held = ("host_bytes", "pool_bytes", "dense_bytes", "index_bytes")
        merged = {name: max(values) if name in held else sum(values) for name, values in counts.items()}
        fields["offload"] = OffloadStats(**said, **merged)
    return Stats(**fields)


class _Writer:
    """Writes answers in the order of their prompts: live as they grow, or each when it is finished."""

    def __init__(self, out: TextIO, prompts: list[Prompt], stops: Sequence[int], *, live: bool, as_json: bool) -> None:
        self._out, self._prompts, self._stops = out, prompts, set(stops)
        self._live, self._json = live and not as_json, as_json
        self._texts = [""] * len(prompts)
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._done = [False] * len(prompts)
        self._current = 0  # the prompt whose answer is being written
        self._written = 0  # characters of it that are out
        self._headed = False
        self.errors: dict[int, str] = {}

    def add(self, index: int, event: BlockEvent) -> None:
        self._texts[index] += event.text or ""
        self._tokens[index] += event.tokens
        self._done[index] |= event.done
        if event.error is not None:
            self.errors[index] = f"prompt {index}: {event.error}"
        while self._current < len(self._prompts) and self._write():
            self._current, self._written, self._headed = self._current + 1, 0, False
        self._out.flush()

    def _write(self) -> bool:
        """Write what can be written of the current answer; whether that was all of it."""
        index, text, done = self._current, self._texts[self._current], self._done[self._current]
        if self._json:
            if done:
                print(json.dumps(self._record(index), ensure_ascii=False), file=self._out)
        elif done or (self._live and len(text) > self._written):
            if len(self._prompts) > 1 and not self._headed:
                first = " ".join(self._prompts[index].text.split())
                print(f"--- {index + 1} of {len(self._prompts)}: {first[:60]}", file=self._out)
                self._headed = True
            print(text[self._written :], end="\n" if done else "", file=self._out)
            self._written = len(text)
        return done

    def _record(self, index: int) -> dict[str, Any]:
        tokens = self._tokens[index]
        stopped = bool(tokens) and tokens[-1] in self._stops
        reason = "stop" if stopped else "error" if index in self.errors else "length"
        return {"index": index, "text": self._texts[index], "tokens": tokens, "finish_reason": reason}


class _Progress:
    """A bar of new tokens on standard error; the total shrinks by what answers that stop early leave unused."""

    def __init__(self, count: int, limit: int, *, enabled: bool) -> None:
        # A log file gets a line now and then, a terminal a moving bar.
        pause = 0.1 if sys.stderr.isatty() else 10.0
        self._bar = tqdm(total=count * limit, unit="token", file=sys.stderr, disable=not enabled, mininterval=pause)
        self._left = [limit] * count

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, index: int, event: BlockEvent) -> None:
        self._left[index] -= len(event.tokens)
        if event.done and self._bar.total is not None:
            self._bar.total -= self._left[index]
        self._bar.update(len(event.tokens))


@contextlib.contextmanager
def _output(name: str | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears under its name only when everything is written."""
    if name is None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the run
        yield sys.stdout
        return
    path = Path(name)
    if path.exists() and not path.is_file():
        if path.is_dir():
            raise GenerationError(f"--output {name} is a directory, but a file was expected")
        with opened(path) as out:
            yield out
        return
    with whole_file(path) as out:
        yield out


if __name__ == "__main__":
    sys.exit(main())
