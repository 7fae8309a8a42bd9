"""herald-generate: what it writes where, in which order, and how it ends."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import herald_jax
from herald_jax import GenerateConfig, cli
from herald_jax.checkpoint import save_checkpoint
from tests import tiny

NEW = 24
FEW = ["--max-new-tokens", str(NEW)]
PROMPTS = ["What is 2 + 2?", "é", "A longer prompt than the others, with 🦊 in it.", "x"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tmp_path_factory.mktemp("cli") / "model"))


@pytest.fixture(scope="module")
def model(checkpoint: str) -> herald_jax.Model:
    return herald_jax.load(checkpoint)


def expected(model: herald_jax.Model, *, chat: bool = True, system: str | None = None, **fields: object) -> list[str]:
    """The answers to PROMPTS, from the library."""
    start = [{"role": "system", "content": system}] if system else []
    conversations = [[*start, {"role": "user", "content": text}] for text in PROMPTS]
    ids = [model.tokenizer.encode_chat(c) for c in conversations] if chat else PROMPTS
    result = herald_jax.generate(model, ids, GenerateConfig(max_new_tokens=NEW, **fields))
    assert result.texts is not None
    return result.texts


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(["", *PROMPTS, ""]), encoding="utf-8")
    return str(path)


def blocks(prompts: list[str], answers: list[str]) -> str:
    """The plain output for several prompts."""
    heads = [f"--- {i} of {len(prompts)}: {prompt}" for i, prompt in enumerate(prompts, start=1)]
    return "".join(f"{head}\n{answer}\n" for head, answer in zip(heads, answers, strict=True))


def type_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


# --- prompts ------------------------------------------------------------------------------------------------------


def test_prompt_as_argument_with_the_checkpoints_template(checkpoint, model, capsys) -> None:
    assert cli.main([checkpoint, PROMPTS[0], *FEW]) == 0
    assert capsys.readouterr().out == expected(model)[0] + "\n"


def test_no_chat_gives_the_prompt_as_it_is(checkpoint, model, capsys) -> None:
    assert cli.main([checkpoint, PROMPTS[0], "--no-chat", *FEW]) == 0
    assert capsys.readouterr().out == expected(model, chat=False)[0] + "\n"
    assert expected(model, chat=False) != expected(model)


def test_without_template_the_default_is_no_chat(tmp_path, model, capsys) -> None:
    assert cli.main([str(tiny.save(tmp_path / "base", chat_template=None)), PROMPTS[0], *FEW]) == 0
    assert capsys.readouterr().out == expected(model, chat=False)[0] + "\n"


def test_prompt_on_standard_input_is_one_prompt(checkpoint, model, capsys, monkeypatch) -> None:
    text = "two\nlines"
    type_in(monkeypatch, (text + "\n").encode())
    assert cli.main([checkpoint, "--no-chat", *FEW]) == 0
    answer = herald_jax.generate(model, [text], GenerateConfig(max_new_tokens=NEW)).texts
    assert capsys.readouterr().out == answer[0] + "\n"


@pytest.mark.parametrize("batch", ["1", "3", "8"])
def test_file_of_prompts_in_order_whatever_the_batch(checkpoint, model, capsys, prompt_file, batch: str) -> None:
    assert cli.main([checkpoint, "--file", prompt_file, "--batch-size", batch, *FEW]) == 0
    assert capsys.readouterr().out == blocks(PROMPTS, expected(model))


@pytest.mark.parametrize("batch", ["1", "8"])
def test_sampling_does_not_depend_on_the_batch(checkpoint, model, capsys, prompt_file, batch: str) -> None:
    flags = ["--temperature", "0.8", "--top-k", "40", "--top-p", "0.95", "--seed", "7"]
    assert cli.main([checkpoint, "--file", prompt_file, "--batch-size", batch, *flags, *FEW]) == 0
    answers = expected(model, temperature=0.8, top_k=40, top_p=0.95, seed=7)
    assert capsys.readouterr().out == blocks(PROMPTS, answers)
    assert answers != expected(model)


def test_lines_of_standard_input(checkpoint, model, capsys, monkeypatch) -> None:
    type_in(monkeypatch, "\r\n".join(PROMPTS).encode())
    assert cli.main([checkpoint, "--file", "-", *FEW]) == 0
    assert capsys.readouterr().out == blocks(PROMPTS, expected(model))


def test_jsonl_with_conversations(checkpoint, model, capsys, tmp_path) -> None:
    conversation = [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": PROMPTS[0]},
    ]
    lines = [PROMPTS[0], {"prompt": PROMPTS[1]}, {"messages": conversation}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    assert cli.main([checkpoint, "--file", str(path), "--json", *FEW]) == 0
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    turns = herald_jax.generate(
        model, [model.tokenizer.encode_chat(conversation)], GenerateConfig(max_new_tokens=NEW)
    ).texts
    assert texts == [*expected(model)[:2], turns[0]]


def test_system_message(checkpoint, model, capsys, prompt_file) -> None:
    assert cli.main([checkpoint, "--file", prompt_file, "--system", "Be brief.", *FEW]) == 0
    assert capsys.readouterr().out == blocks(PROMPTS, expected(model, system="Be brief."))


# --- policies -----------------------------------------------------------------------------------------------------


@pytest.mark.once
@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        (["--policy", "static", "--steps", "2"], herald_jax.StaticLowConfidence(2)),
        (["--threshold", "0.05"], herald_jax.Threshold(0.05)),
        (["--policy", "threshold", "--threshold", "0.5", "--steps", "2"], herald_jax.Threshold(0.5, 2)),
        (["--policy", "entropy-bound", "--entropy-bound", "9"], herald_jax.EntropyBound(9.0)),
        (["--policy", "sequential"], herald_jax.Sequential()),
        (
            ["--threshold", "0.5", "--editing-threshold", "0.3", "--max-post-steps", "2"],
            herald_jax.Editing(herald_jax.Threshold(0.5), 0.3, 2),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_policy_flags(checkpoint, model, capsys, flags: list[str], policy) -> None:
    assert cli.main([checkpoint, PROMPTS[2], "--json", "--stats", *flags, *FEW]) == 0
    answer, stats = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    ids = [model.tokenizer.encode_chat([{"role": "user", "content": PROMPTS[2]}])]
    result = herald_jax.generate(model, ids, GenerateConfig(max_new_tokens=NEW, policy=policy))
    assert answer["tokens"] == result.tokens[0]
    assert stats["stats"]["denoise_steps"] == result.stats.denoise_steps


@pytest.mark.once
def test_plan_flags(tmp_path, capsys) -> None:
    deeper = str(tiny.save(tmp_path / "deeper", num_layers=3))
    model = herald_jax.load(deeper)
    ids = [model.tokenizer.encode_chat([{"role": "user", "content": PROMPTS[2]}])]
    flags = ["--plan", "mage", "--budget", "4", "--min-budget", "0", "--query", "center", "--reduce", "max"]
    flags += [
        "--dense-layers",
        "1",
        "--select-at-step",
        "2",
        "--rest",
        "keep",
        "--page-size",
        "3",
        "--measure",
        "--stats",
    ]
    assert cli.main([deeper, PROMPTS[2], "--json", *flags, *FEW]) == 0
    plan = herald_jax.Mage(
        4,
        min_budget=0,
        query="center",
        reduce="max",
        dense_layers=1,
        select_at_step=2,
        rest="keep",
        page_size=3,
        measure=True,
    )
    result = herald_jax.generate(model, ids, GenerateConfig(max_new_tokens=NEW), plan)
    answer, stats = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert answer["tokens"] == result.tokens[0]
    assert 0 < stats["stats"]["recall"] == pytest.approx(result.stats.recall)

    flags = ["--plan", "herald", "--budget", "4", "--min-budget", "0", "--query", "last", "--selector", "split"]
    flags += [
        "--split",
        "0.4",
        "--index-bits",
        "4",
        "--draft-at",
        "0.3",
        "--no-reuse",
        "--dense-layers",
        "1",
        "--stats",
    ]
    assert cli.main([deeper, PROMPTS[2], "--json", *flags, *FEW]) == 0
    plan = herald_jax.Herald(
        4, min_budget=0, query="last", selector="split", split=0.4, index_bits=4, draft_at=0.3, reuse=False,
        dense_layers=1,
    )  # fmt: skip
    result = herald_jax.generate(model, ids, GenerateConfig(max_new_tokens=NEW), plan)
    answer, stats = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert answer["tokens"] == result.tokens[0]
    assert stats["stats"]["offload"]["selector"] == "split"
    assert stats["stats"]["offload"]["host_bytes"] > 0
    said = f"{stats['stats']['sparse_blocks']} of {stats['stats']['blocks']}"
    assert any("sparse blocks" in line and said in line for line in result.stats.lines())


# --- output -------------------------------------------------------------------------------------------------------


def test_json_and_statistics_over_several_batches(checkpoint, model, capsys, prompt_file) -> None:
    assert cli.main([checkpoint, "--file", prompt_file, "--json", "--stats", "--batch-size", "3", *FEW]) == 0
    captured = capsys.readouterr()
    *answers, stats = (json.loads(line) for line in captured.out.splitlines())
    assert [(a["index"], a["text"]) for a in answers] == list(enumerate(expected(model)))
    for answer in answers:
        stopped = answer["tokens"][-1] == 258
        assert answer["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(answer["tokens"]) == NEW
    assert stats["stats"]["rows"] == len(PROMPTS)
    assert stats["stats"]["new_tokens"] == sum(len(answer["tokens"]) for answer in answers)


def test_statistics_go_to_standard_error(checkpoint, model, capsys) -> None:
    assert cli.main([checkpoint, PROMPTS[0], "--stats", *FEW]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected(model)[0] + "\n"
    for name in ("forwards", "tokens per forward", "steps per block", "prefill", "decode", "KV cache"):
        assert name in captured.err


class Recorder(io.StringIO):
    """Standard output that remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_streaming_writes_block_by_block(checkpoint, model, capsys, monkeypatch, prompt_file, flag: str) -> None:
    out = Recorder()
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main([checkpoint, "--file", prompt_file, flag, *FEW]) == 0
    assert out.getvalue() == blocks(PROMPTS, expected(model))
    texts = [piece for piece in out.pieces if piece.strip() and not piece.startswith("---")]
    live = flag == "--stream"
    assert (len(texts) > len(PROMPTS)) == live
    assert ("token" in capsys.readouterr().err) == (not live), "a progress bar exactly where the answer is not live"


def test_output_file_appears_whole(checkpoint, model, capsys, tmp_path) -> None:
    path = tmp_path / "answer.txt"
    path.write_text("old")
    assert cli.main([checkpoint, PROMPTS[0], "--output", str(path), *FEW]) == 0
    assert path.read_text(encoding="utf-8") == expected(model)[0] + "\n"
    assert capsys.readouterr().out == ""
    assert os.listdir(tmp_path) == ["answer.txt"]


def test_output_through_a_link_replaces_its_target(checkpoint, model, tmp_path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert cli.main([checkpoint, PROMPTS[0], "--output", str(tmp_path / "link"), *FEW]) == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text(encoding="utf-8") == expected(model)[0] + "\n"


def test_output_to_a_device_is_written_not_replaced(checkpoint) -> None:
    assert cli.main([checkpoint, PROMPTS[0], "--output", "/dev/null", *FEW]) == 0
    assert Path("/dev/null").is_char_device()


def test_spread_over_devices_gives_the_same_text(checkpoint, model, capsys) -> None:
    assert cli.main([checkpoint, PROMPTS[0], "--devices", "2", *FEW]) == 0
    assert capsys.readouterr().out == expected(model)[0] + "\n"


# --- what goes wrong ----------------------------------------------------------------------------------------------

WRONG = {
    "policy": (["x", "--policy", "magic"], "invalid choice: 'magic'"),
    "temperature": (["x", "--temperature", "-1"], "temperature is -1.0"),
    "top_p": (["x", "--top-p", "0"], "top_p is 0.0"),
    "top_k": (["x", "--top-k", "999"], "top_k is 999"),
    "tokens": (["x", "--max-new-tokens", "0"], "max_new_tokens is 0"),
    "not_a_number": (["x", "--steps", "two"], "invalid int value: 'two'"),
    "steps": (["x", "--steps", "-2"], "steps is -2"),
    "post_steps_alone": (["x", "--max-post-steps", "1"], "give --editing-threshold too"),
    "other_policys_flag": (["x", "--entropy-bound", "1"], "--entropy-bound belongs to --policy entropy-bound"),
    "other_plans_flag": (["x", "--budget", "64"], "--budget belongs to --plan mage and herald, but the plan is dense"),
    "budget": (["x", "--plan", "mage", "--budget", "1.5"], "budget is 1.5"),
    "no_budget": (["x", "--plan", "mage", "--budget", "all"], "'all' is neither a number of entries nor a fraction"),
    "draft_at": (["x", "--plan", "herald", "--draft-at", "late"], "'late' is neither a fraction nor auto"),
    "plan_for_model": (["x", "--plan", "mage"], "dense_layers is 2, but the model has 2 layers"),
    "batch": (["x", "--batch-size", "0"], "--batch-size is 0"),
    "devices": (["x", "--devices", "64"], "64 devices"),
    "dtype": (["x", "--dtype", "int8"], "invalid choice: 'int8'"),
    "empty": ([""], "the prompt is empty"),
    "long": (["x" * 500], "the model's context is 512 tokens"),
    "two_prompts": (["x", "--file", "prompts.txt"], "only one of them can be used"),
    "no_file": (["--file", "absent.txt"], "absent.txt: No such file or directory"),
    "block_cache": (["x", "--block-cache"], "block_cache needs sub-blocks"),
    "system": (["x", "--no-chat", "--system", "y"], "--system needs a chat template"),
    "output_directory": (["x", "--output", "/"], "is a directory"),
    "output_nowhere": (["x", "--output", "/nowhere/file"], "/nowhere/"),
    "full_disk": (["x", "--output", "/dev/full", *FEW], "/dev/full: No space left on device"),
}


@pytest.mark.parametrize(("flags", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_wrong_requests_get_one_sentence(checkpoint, capsys, flags: list[str], sentence: str) -> None:
    try:
        status = cli.main([checkpoint, *flags])
    except SystemExit as exit_:  # argparse
        status = exit_.code
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert status == 2
    assert last.startswith("error: ")
    assert sentence in last
    assert captured.out == ""
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("p.txt", b"\n \n", "holds no prompt"),
        ("p.txt", b"ok\n\xff\n", "not UTF-8 text (byte 3)"),
        ("p.jsonl", b'"ok"\n{"x": 1}\n', "line 2 of"),
        ("p.jsonl", b"plain", "is not JSON"),
        ("p.jsonl", b'{"messages": []}', "neither a JSON string nor"),
        ("p.jsonl", b'"ok"\n""', "prompt 1 is empty"),
    ],
)
def test_wrong_prompt_files(checkpoint, capsys, tmp_path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert cli.main([checkpoint, "--file", str(tmp_path / name)]) == 2
    assert sentence in capsys.readouterr().err


def test_conversation_without_template(checkpoint, capsys, tmp_path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}))
    assert cli.main([checkpoint, "--file", str(tmp_path / "p.jsonl"), "--no-chat"]) == 2
    assert "a conversation needs a chat template, but --no-chat was given" in capsys.readouterr().err


def test_chat_without_template(tmp_path, capsys) -> None:
    base = str(tiny.save(tmp_path / "base", chat_template=None))
    assert cli.main([base, "x", "--chat"]) == 2
    assert "the checkpoint has no chat template" in capsys.readouterr().err


def test_not_a_checkpoint(tmp_path, capsys) -> None:
    assert cli.main([str(tmp_path), "x"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert cli.main([str(tmp_path / "absent"), "x"]) == 2
    assert "absent" in capsys.readouterr().err


def test_a_bad_prompt_at_the_end_costs_nothing(checkpoint, capsys, tmp_path, monkeypatch) -> None:
    (tmp_path / "answers").write_text("old")
    (tmp_path / "prompts.txt").write_text("fine\n" + "y" * 500)
    monkeypatch.setattr(cli, "stream", lambda *_, **__: pytest.fail("generated before every request was checked"))
    flags = ["--file", str(tmp_path / "prompts.txt"), "--output", str(tmp_path / "answers"), "--batch-size", "1"]
    assert cli.main([checkpoint, *flags]) == 2
    assert "prompt 1 has" in capsys.readouterr().err
    assert (tmp_path / "answers").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["answers", "prompts.txt"]


def test_no_prompt_on_a_terminal(checkpoint, capsys, monkeypatch) -> None:
    ours, theirs = pty.openpty()
    with open(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        assert cli.main([checkpoint]) == 2
    os.close(ours)
    assert "no prompt" in capsys.readouterr().err


def test_out_of_device_memory_is_a_sentence(checkpoint, capsys, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")

    monkeypatch.setattr(cli, "stream", fail)
    assert cli.main([checkpoint, "x"]) == 2
    assert "ran out of memory; lower --batch-size" in capsys.readouterr().err


def test_a_row_that_turns_nan_is_reported(checkpoint, tmp_path, capsys, model) -> None:
    poisoned = jax.tree.map(lambda leaf: leaf, model.params)
    poisoned["norm"]["scale"] = np.full_like(poisoned["norm"]["scale"], np.nan)
    save_checkpoint(tmp_path / "nan", model.config, poisoned, tokenizer_dir=model.tokenizer_dir)
    assert cli.main([str(tmp_path / "nan"), "x", "--json", *FEW]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["finish_reason"] == "error"
    assert "error: prompt 0: " in captured.err


# --- as a process -------------------------------------------------------------------------------------------------

COMMAND = [sys.executable, "-m", "herald_jax.cli"]


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One with room for an answer that takes long."""
    return str(tiny.save(tmp_path_factory.mktemp("cli") / "long", max_position_embeddings=1 << 14))


LONG = ["x", "--policy", "static", "--max-new-tokens", "16000", "--stream"]


def interrupted(command, wait, **options) -> str:
    """What a command prints on standard error when it is interrupted after `wait(process)`. It ends with 130."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            wait(process)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    return err


def test_interrupt_ends_cleanly(long_checkpoint, tmp_path) -> None:
    out = tmp_path / "answer"
    command = [*COMMAND, long_checkpoint, *LONG, "--output", str(out)]

    def until_it_writes(process) -> None:
        while not any(file.stat().st_size for file in tmp_path.glob(".answer.*")):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)

    err = interrupted(command, until_it_writes)
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == []


def test_interrupt_while_compiling_ends_cleanly(long_checkpoint, tmp_path) -> None:
    """XLA goes on compiling; the interpreter that ends meanwhile is not to crash (JAX 0.10 would)."""
    command = [*COMMAND, long_checkpoint, *LONG, "--output", str(tmp_path / "answer")]
    logging = os.environ | {"JAX_LOG_COMPILES": "1"}

    def until_it_compiles(process) -> None:
        while not ("Compiling" in (line := process.stderr.readline()) and "run_blocks" in line):
            assert line
        time.sleep(0.3)

    err = interrupted(command, until_it_compiles, env=logging)
    assert "\ninterrupted\n" in err
    assert os.listdir(tmp_path) == []


def test_reader_that_leaves_early(long_checkpoint) -> None:
    with subprocess.Popen(
        [*COMMAND, long_checkpoint, *LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout.read(1)
            process.stdout.close()
            err = process.stderr.read()
            process.wait(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 141
    assert err == b""


def test_terminal_streams_and_shows_no_bar(checkpoint, model) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*COMMAND, checkpoint, PROMPTS[0], *FEW], stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # what Linux reports once the other side is closed
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert shown.decode("utf-8").replace("\r\n", "\n") == expected(model)[0].replace("\r\n", "\n") + "\n"
