"""PyTorch .bin sources and --verify; they need torch and transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.__main__ import main
from convert.converter import SourceProblems, convert
from convert.verify import verify
from herald_jax.checkpoint import load_checkpoint, save_checkpoint
from herald_jax.errors import ConversionError
from herald_jax.hf_config import Overrides
from herald_jax.model import flatten, unflatten
from tests.convert.checkpoints import CONFIG, tensors, write
from tests.convert.make_fixtures import DATA, FIXTURES, build

pytestmark = pytest.mark.oracle


def save_bin(path: Path, arrays: dict[str, np.ndarray], **changes: Any) -> None:
    import torch

    state = {n: torch.from_numpy(a.astype(np.float32)).to(torch.bfloat16) for n, a in arrays.items()}
    torch.save({**state, **changes}, path)


def bin_checkpoint(directory: Path, arrays: dict[str, np.ndarray], **changes: Any) -> Path:
    write(directory, CONFIG, arrays)
    (directory / "model.safetensors").unlink()
    save_bin(directory / "pytorch_model.bin", arrays, **changes)
    return directory


def test_bin_equals_safetensors(tmp_path: Path) -> None:
    arrays = tensors(CONFIG)
    convert(write(tmp_path / "hf", CONFIG, arrays), tmp_path / "a")
    convert(bin_checkpoint(tmp_path / "bin", arrays), tmp_path / "b")
    a, b = (flatten(load_checkpoint(tmp_path / n).params) for n in "ab")
    assert a.keys() == b.keys()
    for path, leaf in a.items():
        np.testing.assert_array_equal(np.asarray(b[path]), np.asarray(leaf), err_msg=path)


def test_problems_of_bin_files(tmp_path: Path) -> None:
    source = bin_checkpoint(tmp_path / "bin", tensors(CONFIG), step=3)
    with pytest.raises(SourceProblems) as caught:
        convert(source, tmp_path / "out")
    assert caught.value.problems == ("pytorch_model.bin: step is a int, not a tensor",)
    (source / "pytorch_model.bin").write_bytes(b"not a zip archive")
    with pytest.raises(SourceProblems) as caught:
        convert(source, tmp_path / "out")
    assert caught.value.problems[0].startswith("pytorch_model.bin could not be read by torch: ")


def test_a_pickle_that_runs_code_is_not_run(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return Path.touch, (tmp_path / "owned",)  # type: ignore[return-value]

    source = bin_checkpoint(tmp_path / "bin", tensors(CONFIG), payload=Payload())
    with pytest.raises(SourceProblems, match="could not be read by torch"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", FIXTURES)
def test_landed_logits_are_what_transformers_computes_now(tmp_path: Path, name: str) -> None:
    np.testing.assert_allclose(build(name, tmp_path / name), np.load(DATA / name / "logits.npy"), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in FIXTURES), ("llama", "float16")])
def test_verify_accepts_a_right_conversion(tmp_path: Path, name: str, dtype: str) -> None:
    flags = Overrides(mask_token_id=120 if name == "fast_dllm_v2" else None, dtype=dtype)
    convert(DATA / name, tmp_path / "out", overrides=flags)
    assert verify(DATA / name, tmp_path / "out").startswith("verified: logits of ")


def test_verify_notices_one_swapped_pair_of_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(DATA / "sdar", tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out")
    leaves = {path: np.array(leaf) for path, leaf in flatten(loaded.params).items()}
    kernel = leaves["layers/1/attn/qkv/kernel"]
    kernel[:, 0, [0, 1]] = kernel[:, 0, [1, 0]]
    save_checkpoint(tmp_path / "wrong", loaded.config, unflatten(leaves))
    with pytest.raises(ConversionError, match="verification failed: logits differ from transformers' by up to"):
        verify(DATA / "sdar", tmp_path / "wrong")


def test_verify_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DATA / "qwen3"), str(tmp_path / "out"), "--verify"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("verified: logits of 16 tokens equal transformers' to ")
