"""Conversion of checkpoints with experts: every layout, everything that can be wrong with one, and memory."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from convert.__main__ import main
from convert.converter import SourceProblems, _leaf_source, convert
from convert.hf import open_source
from convert.mapping import plan
from convert.moe_rules import ALL_RULES
from convert.source import TensorInfo
from herald_jax.checkpoint import load_checkpoint
from herald_jax.hf_config import Overrides, read_hf_config
from herald_jax.model import flatten, param_specs
from tests.convert.checkpoints import write
from tests.herald_jax.test_hf_moe import END, LLADA2_MINI, SDAR_MOE
from tests.oracles.moe_cases import DATA, MASK

Tensors = dict[str, np.ndarray]


def source(name: str) -> tuple[dict[str, Any], Tensors]:
    """The landed tiny checkpoint: config.json and tensors, one per expert. Their logits are compared elsewhere."""
    config = json.loads((DATA / name / "config.json").read_text())
    return {"mask_token_id": MASK, **config}, load_file(DATA / name / "model.safetensors")


def laid_out(tensors: Mapping[str, np.ndarray], layout: str) -> Tensors:
    """The same experts in another layout."""
    found: Tensors = {}
    experts: dict[str, dict[str, list[np.ndarray]]] = {}
    for name in sorted(tensors, key=lambda n: [int(p) if p.isdigit() else 0 for p in n.split(".")]):
        match = re.fullmatch(r"(.*\.mlp)\.experts\.\d+\.(\w+)\.weight", name)
        if match is None:
            found[name] = tensors[name]
        else:
            experts.setdefault(match[1], {}).setdefault(match[2], []).append(tensors[name])
    for mlp, parts in experts.items():
        gate, up, down = (np.stack(parts[f"{part}_proj"]) for part in ("gate", "up", "down"))
        both = np.concatenate([gate, up], axis=1)
        found |= {
            "stacked": {f"{mlp}.experts.{n}_proj": m for n, m in (("gate", gate), ("up", up), ("down", down))},
            "fused": {f"{mlp}.experts.gate_up_proj": both, f"{mlp}.experts.down_proj": down},
            "dInfer": {f"{mlp}.w1": both, f"{mlp}.w2": down},
        }[layout]
    return found


def load(path: Path) -> Tensors:
    return {name: np.asarray(leaf) for name, leaf in flatten(load_checkpoint(path).params).items()}


def problems(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> list[str]:
    with pytest.raises(SourceProblems) as caught:
        convert(write(directory / "hf", config, tensors), directory / "out")
    assert not (directory / "out").exists()
    return list(caught.value.problems)


@pytest.mark.parametrize("name", ["llada2", "sdar-moe"])
def test_every_layout_gives_the_same_parameters(tmp_path: Path, name: str) -> None:
    config, tensors = source(name)
    convert(write(tmp_path / "hf", config, tensors, shards=3), tmp_path / "per expert")
    expected = load(tmp_path / "per expert")
    for layout in ("stacked", "fused", "dInfer"):
        again = {**config, "model_type": "llada2_moe_veomni"} if (name, layout) == ("llada2", "stacked") else config
        report = convert(write(tmp_path / f"hf {layout}", again, laid_out(tensors, layout)), tmp_path / layout)
        found = load(tmp_path / layout)
        assert found.keys() == expected.keys()
        for path, leaf in expected.items():
            np.testing.assert_array_equal(found[path], leaf, err_msg=f"{layout} {path}")
        assert report.tensors == len(laid_out(tensors, layout))


def test_experts_end_up_where_they_belong(tmp_path: Path) -> None:
    """Said once more by index arithmetic, for the parts that only experts have."""
    config, tensors = source("llada2")
    convert(write(tmp_path / "hf", config, tensors), tmp_path / "out")
    found = load(tmp_path / "out")
    mlp = "model.layers.2.mlp"
    for expert in (0, 7, 15):
        for index, part in enumerate(("gate", "up")):
            expected = tensors[f"{mlp}.experts.{expert}.{part}_proj.weight"].T
            np.testing.assert_array_equal(found["layers/2/mlp/experts/gate_up"][expert, :, index], expected)
        expected = tensors[f"{mlp}.experts.{expert}.down_proj.weight"].T
        np.testing.assert_array_equal(found["layers/2/mlp/experts/down"][expert], expected)
    np.testing.assert_array_equal(found["layers/2/mlp/router/kernel"], tensors[f"{mlp}.gate.weight"].T)
    np.testing.assert_array_equal(found["layers/2/mlp/router/bias"], tensors[f"{mlp}.gate.expert_bias"])
    # Query head 3 is the second of KV head 1's two.
    rows = tensors["model.layers.0.attention.query_key_value.weight"]
    qkv = found["layers/0/attn/qkv/kernel"]
    np.testing.assert_array_equal(qkv[:, 1, 1], rows[3 * 16 : 4 * 16].T)
    np.testing.assert_array_equal(qkv[:, 1, 2], rows[5 * 16 : 6 * 16].T)
    np.testing.assert_array_equal(qkv[:, 1, 3], rows[7 * 16 : 8 * 16].T)


def test_the_router_stays_float32(tmp_path: Path) -> None:
    config, tensors = source("llada2")
    half = {n: t if ".mlp.gate." in n else t.astype(ml_dtypes.bfloat16) for n, t in tensors.items()}
    report = convert(write(tmp_path / "hf", {**config, "torch_dtype": "bfloat16"}, half), tmp_path / "out")
    found = load(tmp_path / "out")
    assert {path for path, leaf in found.items() if leaf.dtype == np.float32} == {
        f"layers/{i}/mlp/router/{leaf}" for i in (1, 2) for leaf in ("kernel", "bias")
    }
    np.testing.assert_array_equal(found["layers/1/mlp/router/kernel"], tensors["model.layers.1.mlp.gate.weight"].T)
    assert not any("were converted" in note for note in report.notes)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    config, tensors = source("llada2")
    without = {n: t for n, t in tensors.items() if n != "model.layers.2.mlp.gate.expert_bias"}
    assert problems(tmp_path, config, without) == [
        "model.layers.2.mlp.gate.expert_bias [16] is missing (a buffer beside the router's weight, which tools drop; "
        "without it the router errs)"
    ]
    both = tensors | {n: t for n, t in laid_out(tensors, "stacked").items() if n.startswith("model.layers.1.")}
    assert problems(tmp_path, config, both) == [
        "the experts are in two layouts at once, stacked (model.layers.1.mlp.experts.gate_proj) and per expert "
        "(model.layers.1.mlp.experts.0.down_proj.weight); one of them must go"
    ]
    mixed = dict(tensors)
    del mixed["model.layers.1.mlp.experts.3.up_proj.weight"]
    mixed["model.layers.2.mlp.experts.16.up_proj.weight"] = tensors["model.layers.2.mlp.experts.0.up_proj.weight"]
    mixed["model.layers.2.mlp.experts.5.down_proj.weight"] = tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    mixed["model.layers.0.mlp.gate.weight"] = tensors["model.layers.1.mlp.gate.weight"]
    assert problems(tmp_path, config, mixed) == [
        "model.layers.0.mlp.gate.weight has no place in this configuration (family llada2: qkv_bias false, out_bias "
        "false, qk_norm true, tie_word_embeddings false, first_k_dense_replace 1)",
        "model.layers.2.mlp.experts.5.down_proj.weight has shape [12, 32] instead of [32, 12]",
        "model.layers.2.mlp.experts.16.up_proj.weight belongs to expert 16, but num_experts is 16",
        "model.layers.1.mlp.experts.3.up_proj.weight [12, 32] is missing",
    ]
    fused = laid_out(tensors, "fused")
    del fused["model.layers.1.mlp.experts.down_proj"]
    assert problems(tmp_path, config, fused) == ["model.layers.1.mlp.experts.down_proj [16, 32, 12] is missing"]


def test_dry_run_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, tensors = source("llada2")
    assert main([str(write(tmp_path / "hf", config, tensors)), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, last = (f"model.layers.1.mlp.experts.{e}.{p}_proj.weight" for e, p in ((0, "gate"), (15, "up")))
    assert (
        f"layers/1/mlp/experts/gate_up float32[16, 32, 2, 12] <- {first} (gate 0) + 30 more + {last} (up 15)"
    ) in lines
    assert "layers/1/mlp/router/bias float32[16] <- model.layers.1.mlp.gate.expert_bias" in lines


@pytest.mark.parametrize(
    ("config", "count"),
    [(LLADA2_MINI, 19 * 779 + 9 + 3), (SDAR_MOE, 48 * 393 + 3)],
    ids=["LLaDA2-mini", "SDAR-30B-A3B"],
)
def test_published_sizes_map_completely(tmp_path: Path, config: dict[str, Any], count: int) -> None:
    """Tensors by the rules' own patterns and the published dimensions; no weights needed."""
    for name, value in {"config.json": config, **(END if config is LLADA2_MINI else {})}.items():
        (tmp_path / name).write_text(json.dumps(value))
    parsed = read_hf_config(tmp_path).config
    assert parsed.moe is not None
    specs, tensors = param_specs(parsed), {}
    for rule in ALL_RULES[parsed.family]:
        if rule.transform is None or rule.path is None or (rule.layouts and "per expert" not in rule.layouts):
            continue
        for layer in range(parsed.num_layers) if "{layer}" in rule.pattern else (0,):
            if rule.path.replace("{layer}", str(layer)) not in specs:
                continue
            for expert in range(parsed.moe.num_experts) if "{expert}" in rule.pattern else (0,):
                name = rule.pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))
                tensors[name] = TensorInfo(rule.transform.shape(parsed), np.dtype(np.float32), "BF16", 2, "f", 0)
    assert len(tensors) == count
    assert plan(parsed, tensors).problems == []


def peak(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], rows: int) -> int:
    """Most bytes that reading layer 1's experts, `rows` at a time, holds at once."""
    opened = open_source(write(directory, config, tensors))
    try:
        mapping = plan(read_hf_config(directory, Overrides()).config, opened.tensors)
        assert mapping.problems == []
        leaf = _leaf_source(opened, mapping.leaves["layers/1/mlp/experts/gate_up"])
        tracemalloc.start()
        for slab in leaf.read(rows):
            assert slab.shape[0] == rows
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        opened.close()


@pytest.mark.parametrize("layout", ["per expert", "stacked", "fused"])
def test_memory_does_not_grow_with_the_number_of_experts(tmp_path: Path, layout: str) -> None:
    """Two experts at a time need what two experts need, of 8 or of 64: a checkpoint's size plays no part."""
    config, tensors = source("llada2")
    config = {**config, "hidden_size": 64, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    peaks = {}
    for count in (8, 64):
        sized = {**config, "num_experts": count}
        shapes = {"gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128)}
        # float16 source: casting is part of what is held.
        experts = {
            f"model.layers.1.mlp.experts.{e}.{part}.weight": np.ones(shape, np.float16)
            for e in range(count)
            for part, shape in shapes.items()
        }
        others: Tensors = {}
        for name, tensor in tensors.items():
            if ".experts." in name or "layers.2." in name:
                continue
            shape = [64 if n == 32 else n for n in tensor.shape]
            if ".shared_experts." in name:
                shape = [128 if n == 12 else n for n in shape]
            if ".mlp.gate." in name:
                shape[0] = count
            others[name] = np.ones(shape, np.float16)
        everything = others | experts
        everything = everything if layout == "per expert" else laid_out(everything, layout)
        peaks[count] = peak(tmp_path / f"{layout} {count}", sized, everything, 2)
    slab = 2 * 64 * 2 * 128 * 4
    assert peaks[64] < 1.2 * peaks[8]
    assert peaks[64] < 3 * slab
