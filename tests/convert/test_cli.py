"""The command: exit codes, sentences, dry run; and `python -m convert` end to end in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from convert.__main__ import main
from herald_jax.checkpoint import load_checkpoint
from tests.convert.checkpoints import CONFIG, SDAR, config_without, tensors, write

ROOT = Path(__file__).parents[2]


def test_converts_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "hf", SDAR)
    assert main([str(source), str(tmp_path / "out"), "--dtype", "float32", "--stop-token-ids", "2, 3"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"wrote {tmp_path / 'out'}: 25 tensors, 16.0 kB in ")
    assert "note: dtype float32 given by --dtype: config.json says bfloat16\n" in err
    assert "16.0k/16.0k" in err  # the bar counts bytes ...
    assert "25/25 tensors" in err  # ... and tensors
    assert load_checkpoint(tmp_path / "out").config.diffusion.stop_token_ids == (2, 3)


def test_every_flag_reaches_the_configuration(tmp_path: Path) -> None:
    config = config_without("block_size", "mask_token_id", "model_type", "architectures", base=SDAR)
    source = write(tmp_path / "hf", config, tensors(SDAR))
    flags = {
        "--family": "sdar",
        "--block-length": "16",
        "--small-block": "8",
        "--mask-token-id": "0",
        "--logit-alignment": "shifted",
        "--first-canvas": "seed_and_masks",
        "--stop-token-ids": "none",
        "--dtype": "float16",
    }
    arguments = [part for pair in flags.items() for part in pair]
    assert main([str(source), str(tmp_path / "out"), *arguments]) == 0
    found = load_checkpoint(tmp_path / "out").config
    contract = found.diffusion
    assert (found.family, found.dtype, contract.block_length, contract.small_block_length) == ("sdar", "float16", 16, 8)
    assert (contract.mask_token_id, contract.stop_token_ids) == (0, ())
    assert (contract.logit_alignment, contract.first_canvas) == ("shifted", "seed_and_masks")


def test_dry_run_prints_the_mapping_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "hf", CONFIG)
    assert main([str(source), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "embed/embedding bfloat16[40, 12] <- model.embed_tokens.weight" in lines
    assert (
        "layers/1/attn/qkv/kernel bfloat16[12, 2, 5, 4] <- model.layers.1.self_attn.q_proj.weight (query) + "
        "model.layers.1.self_attn.k_proj.weight (key) + model.layers.1.self_attn.v_proj.weight (value)"
    ) in lines
    assert lines[-5:] == [
        "19 parameters, 8.0 kB",
        "note: block_length 1 supplied by family qwen3: a causal language model runs as the AR limit of the block path",
        "note: logit_alignment shifted supplied by family qwen3: its config.json never states it",
        "note: first_canvas seed_and_masks supplied by family qwen3: its config.json never states it",
        "no problems",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_dry_run_lists_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = tensors(CONFIG)
    for i in range(70):
        arrays[f"extra.{i}"] = arrays["model.norm.weight"]
    source = write(tmp_path / "hf", CONFIG, arrays)
    assert main([str(source), "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert out.count("problem: extra.") == 70
    assert err == f"error: {source} cannot be converted, 70 problems\n"
    assert main([str(source), str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("  - extra.") == 60
    assert err.endswith("  and 10 more (--dry-run lists all)\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["absent", "out"], "error: absent does not exist\n"),
        (["hf", "hf"], "is not empty and not a herald_jax checkpoint; give another destination\n"),
        (["hf", "out", "--family", "sdar"], "give --block-length\n"),
        (["hf", "file/out"], "file is not a directory\n"),
    ],
    ids=["no source", "destination", "flag", "below a file"],
)
def test_bad_input_is_one_sentence_and_exit_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    write(tmp_path / "hf", CONFIG)
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.endswith(sentence)
    assert err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "hf"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["hf"], "DST is missing"),
        (["hf", "out", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["hf", "out", "--block-length", "0"], "argument --block-length: must be at least 1"),
        (["hf", "out", "--mask-token-id", "-1"], "argument --mask-token-id: '-1' is not a non-negative integer"),
        (["hf", "out", "--stop-token-ids", "2,x"], "argument --stop-token-ids: 'x' is not a non-negative integer"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


def test_python_m_convert(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", CONFIG, shards=2)
    command = [sys.executable, "-m", "convert", str(source), str(tmp_path / "out")]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith(f"wrote {tmp_path / 'out'}: 25 tensors")
    assert "WARNING" not in child.stderr
    assert json.loads((tmp_path / "out/herald.json").read_text())["config"]["family"] == "qwen3"
