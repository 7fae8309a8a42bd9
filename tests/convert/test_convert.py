"""Whole conversions: values, landed logits, everything that can be wrong with a source, interruption, memory."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert.converter import SourceProblems, cast, convert
from convert.mapping import plan
from convert.rules import RULES, Rule
from convert.source import TensorInfo
from convert.verify import whole_sequence_logits
from herald_jax.checkpoint import load_checkpoint
from herald_jax.errors import ConversionError
from herald_jax.hf_config import Overrides, read_hf_config
from herald_jax.model import flatten
from tests.convert.checkpoints import CONFIG, FAST_DLLM, SDAR, config_without, tensors, write, write_safetensors
from tests.convert.make_fixtures import DATA, FIXTURES, tokens
from tests.herald_jax.test_hf_config import FAST_DLLM_7B, SDAR_4B

ROOT = Path(__file__).parents[2]
QWEN2 = config_without(architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=True)


def load(path: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in flatten(load_checkpoint(path).params).items()}


def problems(source: Path, **flags: Any) -> list[str]:
    """What is wrong, and that nothing was written."""
    target = source.parent / "refused"
    with pytest.raises(SourceProblems) as caught:
        convert(source, target, overrides=Overrides(**flags))
    assert sorted(p.name for p in source.parent.iterdir() if "refused" in p.name) == []
    return list(caught.value.problems)


# -- right results -----------------------------------------------------------------------------------------------------


def expected_leaves(config: Mapping[str, Any], hf: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The contract's layout, said once more in the plainest way: one element at a time by index arithmetic."""
    k, d = config["num_key_value_heads"], config["head_dim"]
    g = config["num_attention_heads"] // k
    leaves = {"embed/embedding": hf["model.embed_tokens.weight"], "norm/scale": hf["model.norm.weight"]}
    if "lm_head.weight" in hf:
        leaves["head/kernel"] = hf["lm_head.weight"]
    for i in range(config["num_hidden_layers"]):
        source, path = f"model.layers.{i}.", f"layers/{i}/"
        leaves[f"{path}attn_norm/scale"] = hf[f"{source}input_layernorm.weight"]
        leaves[f"{path}mlp_norm/scale"] = hf[f"{source}post_attention_layernorm.weight"]
        for kind, name in (("kernel", "weight"), ("bias", "bias")):
            if f"{source}self_attn.q_proj.{name}" not in hf:
                continue
            q, key, value = (hf[f"{source}self_attn.{n}_proj.{name}"] for n in "qkv")
            fused = np.zeros((k, g + 2, d, *q.shape[1:]), q.dtype)
            for head in range(k):
                for j in range(g):
                    fused[head, j] = q[(head * g + j) * d : (head * g + j + 1) * d]
                fused[head, g] = key[head * d : (head + 1) * d]
                fused[head, g + 1] = value[head * d : (head + 1) * d]
            leaves[f"{path}attn/qkv/{kind}"] = np.moveaxis(fused, -1, 0) if kind == "kernel" else fused
        for n in ("q", "k"):
            if f"{source}self_attn.{n}_norm.weight" in hf:
                leaves[f"{path}attn/{n}_norm/scale"] = hf[f"{source}self_attn.{n}_norm.weight"]
        out = hf[f"{source}self_attn.o_proj.weight"]
        leaves[f"{path}attn/out/kernel"] = out.T.reshape(k, g, d, -1)
        gate, up = hf[f"{source}mlp.gate_proj.weight"], hf[f"{source}mlp.up_proj.weight"]
        leaves[f"{path}mlp/gate_up/kernel"] = np.stack([gate.T, up.T], axis=1)
        leaves[f"{path}mlp/down/kernel"] = hf[f"{source}mlp.down_proj.weight"].T
    return leaves


@pytest.mark.parametrize("shards", [1, 3], ids=["one file", "three shards"])
@pytest.mark.parametrize("config", [CONFIG, SDAR, QWEN2], ids=["qwen3", "sdar", "qwen2 tied"])
def test_every_leaf(tmp_path: Path, config: dict[str, Any], shards: int) -> None:
    arrays = tensors(config)
    report = convert(write(tmp_path / "hf", config, arrays, shards=shards), tmp_path / "out")
    found, expected = load(tmp_path / "out"), expected_leaves(config, arrays)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
    assert report.tensors == len(arrays)
    assert report.bytes_written == sum(a.nbytes for a in arrays.values())


def test_a_single_file_and_wide_tensors(tmp_path: Path) -> None:
    """Sizes beyond the transposing copy's band of 128 rows, none of them a multiple of it."""
    config = config_without(hidden_size=133, intermediate_size=260, head_dim=50, vocab_size=300)
    arrays = tensors(config, np.float32)
    source = write(tmp_path / "hf", config, arrays)
    convert(source / "model.safetensors", tmp_path / "out", overrides=Overrides(dtype="float32"))
    found = load(tmp_path / "out")
    for path, leaf in expected_leaves(config, arrays).items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)


@pytest.mark.parametrize("name", FIXTURES)
def test_landed_checkpoints_give_transformers_logits(tmp_path: Path, name: str) -> None:
    """Directories that transformers' save_pretrained wrote, and the logits it computed (make_fixtures.py)."""
    flags = Overrides(mask_token_id=120) if name == "fast_dllm_v2" else Overrides()
    convert(DATA / name, tmp_path / "out", overrides=flags)
    loaded = load_checkpoint(tmp_path / "out", dtype="float32")
    assert loaded.config.diffusion.block_length == FIXTURES[name].block_length
    actual = whole_sequence_logits(loaded.config, loaded.params, jnp.asarray(tokens(), jnp.int32))
    np.testing.assert_allclose(np.asarray(actual), np.load(DATA / name / "logits.npy"), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("stored", "asked"), [(np.float32, "bfloat16"), (np.float16, "float32"), (np.float64, "float32")]
)
def test_dtypes_are_cast_and_noted(tmp_path: Path, stored: Any, asked: str) -> None:
    arrays = tensors(CONFIG, stored)
    report = convert(write(tmp_path / "hf", CONFIG, arrays), tmp_path / "out", overrides=Overrides(dtype=asked))
    dtype = np.dtype(asked) if asked != "bfloat16" else np.dtype(ml_dtypes.bfloat16)
    for path, leaf in expected_leaves(CONFIG, {n: a.astype(dtype) for n, a in arrays.items()}).items():
        np.testing.assert_array_equal(load(tmp_path / "out")[path], leaf, err_msg=path)
    name = {"float64": "F64", "float32": "F32", "float16": "F16"}[np.dtype(stored).name]
    assert report.notes[-2] == f"weights stored as {name} were converted to {asked}"


def test_a_weight_that_does_not_fit_the_dtype_stops_the_conversion(tmp_path: Path) -> None:
    arrays = tensors(CONFIG)
    arrays["model.norm.weight"][3] = 1e5
    source = write(tmp_path / "hf", CONFIG, arrays)
    with pytest.raises(ConversionError) as caught:
        convert(source, tmp_path / "out", overrides=Overrides(dtype="float16"))
    assert str(caught.value) == (
        "model.norm.weight holds 9.984e+04, beyond the range of float16; choose another --dtype"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_infinities_that_were_there_are_kept() -> None:
    array = np.array([np.inf, 1.0], np.float32)
    np.testing.assert_array_equal(cast(array, np.dtype(np.float16), "x"), array.astype(np.float16))


def test_what_travels_along(tmp_path: Path) -> None:
    files = {
        "generation_config.json": {"eos_token_id": [2, 3]},
        "tokenizer_config.json": {"mask_token": None},
        "tokenizer.json": {"model": {"vocab": {"a": 0}}, "added_tokens": []},
    }
    source = write(tmp_path / "hf", SDAR, files=files, shards=2)
    (source / "merges.txt").write_text("a b\n")
    (source / "README.md").write_text("not this")
    convert(source, tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out")
    assert loaded.tokenizer_dir == tmp_path / "out/tokenizer"
    assert sorted(p.name for p in loaded.tokenizer_dir.iterdir()) == [
        "merges.txt",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((tmp_path / "out/source/config.json").read_text()) == SDAR
    provenance = loaded.provenance
    assert provenance["source"] == str(source)
    assert [f["name"] for f in provenance["files"]] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert provenance["files"][0]["bytes"] == (source / "model-00001-of-00002.safetensors").stat().st_size
    assert all(re.fullmatch(r"[0-9a-f]{64}", f["sha256"]) for f in provenance["files"])
    assert "logit_alignment same supplied by family sdar: its config.json never states it" in provenance["notes"]
    assert {"jax", "orbax-checkpoint", "numpy"} <= provenance["versions"].keys()
    assert loaded.config.diffusion.stop_token_ids == (2, 3)


def test_a_tied_head_may_be_present_if_it_is_equal(tmp_path: Path) -> None:
    arrays = tensors(QWEN2)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    convert(write(tmp_path / "hf", QWEN2, arrays), tmp_path / "out")
    assert "head/kernel" not in load(tmp_path / "out")
    arrays["lm_head.weight"][17, 3] += 1
    assert problems(write(tmp_path / "hf2", QWEN2, arrays)) == [
        "lm_head.weight differs from model.embed_tokens.weight (first in row 17) although tie_word_embeddings is true; "
        "if the head is the checkpoint's own, set tie_word_embeddings to false in config.json"
    ]


def test_rotary_buffers_are_ignored_on_purpose(tmp_path: Path) -> None:
    arrays = tensors(CONFIG)
    arrays |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32) for i in range(2)}
    convert(write(tmp_path / "hf", CONFIG, arrays), tmp_path / "out")
    assert len(load(tmp_path / "out")) == len(expected_leaves(CONFIG, arrays))


# -- everything that can be wrong with the tensors ---------------------------------------------------------------------


def test_all_problems_of_the_tensors_together(tmp_path: Path) -> None:
    arrays = tensors(CONFIG)
    del arrays["model.layers.1.self_attn.k_proj.weight"]
    del arrays["lm_head.weight"]
    arrays["model.layers.0.mlp.up_proj.weight"] = arrays["model.layers.0.mlp.up_proj.weight"][:-1].copy()
    arrays["model.layers.0.self_attn.sinks"] = np.zeros(6, np.float32)
    arrays["model.layers.2.input_layernorm.weight"] = np.zeros(12, np.float32)
    arrays["model.layers.0.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    arrays["model.norm.weight"] = np.zeros(12, np.int8)
    assert sorted(problems(write(tmp_path / "hf", CONFIG, arrays))) == [
        "lm_head.weight [40, 12] is missing (tie_word_embeddings is false)",
        "model.layers.0.mlp.up_proj.weight has shape [19, 12] instead of [20, 12]",
        "model.layers.0.self_attn.q_proj.bias has no place in this configuration (family qwen3: qkv_bias false, "
        "out_bias false, qk_norm true, tie_word_embeddings false)",
        "model.layers.0.self_attn.sinks [6] is unknown to family qwen3",
        "model.layers.1.self_attn.k_proj.weight [8, 12] is missing",
        "model.layers.2.input_layernorm.weight belongs to layer 2, but num_hidden_layers is 2",
        "model.norm.weight is stored as I8, which cannot be converted; use unquantised weights",
    ]


def test_the_message_lists_the_problems(tmp_path: Path) -> None:
    arrays = tensors(CONFIG)
    del arrays["model.norm.weight"]
    source = write(tmp_path / "hf", CONFIG, arrays)
    with pytest.raises(SourceProblems) as caught:
        convert(source, tmp_path / "out")
    assert str(caught.value) == f"{source} cannot be converted: model.norm.weight [12] is missing"
    (source / "model.safetensors").unlink()
    write_safetensors(source / "model.safetensors", {"x": np.zeros(1, np.float32)})
    with pytest.raises(SourceProblems) as caught:
        convert(source, tmp_path / "out")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{source} cannot be converted, 26 problems:"
    assert "  - x [1] is unknown to family qwen3" in lines


def infos(names: list[str], shape: tuple[int, ...] = (12,)) -> dict[str, TensorInfo]:
    return {name: TensorInfo(shape, np.dtype(np.float32), "F32", 48, "f", 0) for name in names}


def test_doubly_matched_and_doubly_set(tmp_path: Path) -> None:
    write(tmp_path / "hf", CONFIG)
    config = read_hf_config(tmp_path / "hf").config
    (norm,) = (rule for rule in RULES["qwen3"] if rule.pattern == "model.norm.weight")
    again = dataclasses.replace(norm, pattern="model.final_norm.weight")
    found = plan(config, infos(["model.norm.weight", "model.final_norm.weight"]), (*RULES["qwen3"], again, norm))
    assert found.problems[0] == "model.norm.weight matches two rules, model.norm.weight and model.norm.weight"
    found = plan(config, infos(["model.norm.weight", "model.final_norm.weight"]), (*RULES["qwen3"], again))
    assert found.problems[0] == "norm/scale (all) is set by both model.final_norm.weight and model.norm.weight"
    found = plan(config, {}, tuple(rule for rule in RULES["qwen3"] if rule is not norm))
    assert "no rule fills norm/scale (all)" in found.problems


@pytest.mark.parametrize(
    ("published", "count"), [(SDAR_4B, 399), (FAST_DLLM_7B, 339)], ids=["SDAR-4B", "Fast_dLLM_v2_7B"]
)
def test_published_checkpoints_map_completely(tmp_path: Path, published: dict[str, Any], count: int) -> None:
    """Names as published (SDAR-4B's index lists these 399), shapes by the published dimensions; no weights needed."""
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = read_hf_config(tmp_path).config
    small = tensors({"head_dim": 2, **published, "vocab_size": 3, "hidden_size": 2, "intermediate_size": 5})
    shapes = {rule.pattern: rule.transform.shape(config) for rule in RULES[config.family] if rule.transform}
    listed = {}
    for name in small:
        layer = re.sub(r"layers\.\d+", "layers.{layer}", name)
        listed[name] = dataclasses.replace(infos([name])[name], shape=shapes[layer])
    assert len(listed) == count
    found = plan(config, listed)
    assert found.problems == []
    assert sum(len(leaf.sources) for leaf in found.leaves.values()) == count


def test_rules_match_whole_names_only() -> None:
    rule = Rule("model.layers.{layer}.mlp.up_proj.weight", None, None)
    assert rule.match("model.layers.12.mlp.up_proj.weight") == ("12", "")
    for name in (
        "xmodel.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight.scale",
        "model.layers.01.mlp.up_proj.weight",
        "model.layers.x.mlp.up_proj.weight",
        "modelxlayers.1.mlp.up_proj.weight",
    ):
        assert rule.match(name) is None


# -- everything that can be wrong with the files -----------------------------------------------------------------------


def edit_index(source: Path, **moves: str | None) -> None:
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, shard in moves.items():
        if shard is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
    path.write_text(json.dumps(index))


def test_all_problems_of_the_files_together(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", CONFIG, shards=4)
    one, two, three, four = (f"model-{i:05}-of-00004.safetensors" for i in (1, 2, 3, 4))
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    in_one = [name for name, shard in index.items() if shard == one]
    in_four = [name for name, shard in index.items() if shard == four]
    (source / two).unlink()
    size = (source / three).stat().st_size
    os.truncate(source / three, size - 1)
    edit_index(source, **{in_one[0]: four, in_one[1]: None, "model.ghost": one, "escape": "../secret"})
    found = problems(source)
    assert found[:5] == [
        "model.safetensors.index.json places escape in '../secret', which is not a file name",
        f"model.safetensors.index.json names {two} (6 tensors), which does not exist",
        f"model.safetensors.index.json places {in_one[0]} in {four}, but it is in {one}",
        f"model.safetensors.index.json places model.ghost in {one}, which does not have it",
        f"{one} has {in_one[1]}, which model.safetensors.index.json does not list",
    ]
    assert found[5].startswith(f"{three} is truncated: ")
    assert len(found) == 6
    assert in_four  # the sound shard is not mentioned


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", CONFIG, shards=2)
    arrays = tensors(CONFIG)
    names = list(arrays)
    second = {name: arrays[name] for name in (*names[1::2], names[0])}
    write_safetensors(source / "model-00002-of-00002.safetensors", second)
    assert problems(source) == [
        f"{names[0]} is in both model-00001-of-00002.safetensors and model-00002-of-00002.safetensors"
    ]


def test_a_broken_index(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", CONFIG, shards=2)
    (source / "model.safetensors.index.json").write_text("{")
    assert problems(source)[0].startswith("model.safetensors.index.json is not a valid index: JSONDecodeError")


def test_config_and_file_problems_come_together(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", config_without("rope_theta"))
    os.truncate(source / "model.safetensors", 30)
    found = problems(source)
    assert found[0].startswith("model.safetensors is truncated")
    assert found[1].startswith("config.json does not state rope_theta")


def test_sources_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "loose").mkdir()
    for name in ("a", "b"):
        (tmp_path / "loose" / f"{name}.safetensors").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("")
    for name, sentence in {
        "absent": "does not exist",
        "empty": "holds no weights (no .safetensors, .bin or .gguf file)",
        "loose": "holds 2 weight files (a.safetensors, ...) but no model.safetensors.index.json",
        "notes.txt": "is neither a .safetensors, a .bin nor a .gguf file",
    }.items():
        with pytest.raises(ConversionError) as caught:
            convert(tmp_path / name, tmp_path / "out")
        assert str(caught.value) == f"{tmp_path / name} {sentence}"


def test_single_file_beside_an_index_is_preferred(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", CONFIG, shards=2)
    write(source, CONFIG, tensors(CONFIG, seed=1))
    report = convert(source, tmp_path / "out")
    assert report.notes[0] == "model.safetensors.index.json was ignored: model.safetensors exists beside it"
    np.testing.assert_array_equal(load(tmp_path / "out")["norm/scale"], tensors(CONFIG, seed=1)["model.norm.weight"])


def test_fast_dllm_converts_with_its_own_mask_id(tmp_path: Path) -> None:
    """Only the embedding has the real vocabulary."""
    config = {**FAST_DLLM, "tie_word_embeddings": True}
    report = convert(write(tmp_path / "hf", config), tmp_path / "out")
    assert report.config.diffusion.mask_token_id == 151665
    assert load(tmp_path / "out")["embed/embedding"].shape == (152064, 12)
