"""Mixtures of experts against software that is not ours: logits of transformers' Glm4Moe and Qwen3Moe, block routing as
SGLang describes it, and decoding, with and without token editing, by diffusers' own LLaDA2 pipeline.

Expected values: tests/oracles/moe_data, recorded by tests/oracles/moe.py.
"""

from __future__ import annotations

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

import herald_jax
from convert.converter import convert
from convert.verify import whole_sequence_logits
from herald_jax import GenerateConfig
from herald_jax.config import MoEConfig
from herald_jax.denoise import Editing, Threshold
from herald_jax.moe import route
from tests.oracles.moe_cases import BLOCK, CASES, DATA, MASK, SDAR_THRESHOLD, Case, logits_ids

ATOL = 2e-4
DECODES = json.loads((DATA / "decodes.json").read_text())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> functools.partial[herald_jax.Model]:
    """`checkpoints(name)`: a landed checkpoint, converted and loaded once."""
    root = tmp_path_factory.mktemp("moe")

    @functools.cache
    def get(name: str) -> herald_jax.Model:
        convert(DATA / name, root / name)
        return herald_jax.load(root / name)

    return functools.partial(get)


@pytest.mark.parametrize("name", ["llada2", "sdar-moe"])
def test_logits(name: str, checkpoints: functools.partial[herald_jax.Model]) -> None:
    model = checkpoints(name)
    assert model.config.dtype == "float32"
    assert model.config.diffusion.block_length == BLOCK
    logits = whole_sequence_logits(model.config, model.params, jnp.array([logits_ids(name)], jnp.int32))
    np.testing.assert_allclose(np.asarray(logits[0]), np.load(DATA / "logits.npz")[name], rtol=0, atol=ATOL)


def test_the_checkpoints_have_every_routing_feature(checkpoints: functools.partial[herald_jax.Model]) -> None:
    llada2, sdar = checkpoints("llada2").config, checkpoints("sdar-moe").config
    assert llada2.moe == MoEConfig(16, 3, 12, "sigmoid", True, 2.5, True, 4, 2, shared_size=12, first_dense_layers=1)
    assert (llada2.rope.rotary_dim, llada2.head_dim, llada2.qk_norm) == (8, 16, True)
    assert sdar.moe == MoEConfig(8, 3, 12, "softmax", True)
    assert sdar.rope.rotary_dim is None


def test_block_routing() -> None:
    """LLaDA2.2's: every token of a block chooses among the experts that its block has chosen."""
    recorded = np.load(DATA / "routing.npz")
    moe = MoEConfig(32, 4, 1, "sigmoid", True, 2.5, True, block_capacity=12)
    logits = jnp.asarray(recorded["logits"])[None]
    weights, experts = route(logits, moe, jnp.asarray(recorded["bias"]), 8)
    dense = np.zeros((24, 32), np.float32)
    np.put_along_axis(dense, np.asarray(experts[0]), np.asarray(weights[0]), axis=1)
    np.testing.assert_allclose(dense, 2.5 * recorded["weights"], rtol=0, atol=1e-6)
    assert len({int(e) for e in np.asarray(experts[0, :8]).ravel()}) <= 12
    with pytest.raises(ValueError, match="whole blocks: 20 tokens, block length 8"):
        route(logits[:, :20], moe, None, 8)


def request(case: Case) -> GenerateConfig:
    """The pipeline's setting in our words."""
    fill = Threshold(case.threshold, case.steps if case.steps <= BLOCK else None)
    policy = fill if case.editing is None else Editing(fill, case.editing, case.max_post_steps)
    stop = DECODES[case.name]["stop"]
    return GenerateConfig(
        max_new_tokens=case.max_new_tokens, policy=policy, stop_token_ids=() if stop is None else (stop,)
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decoding(case: Case, checkpoints: functools.partial[herald_jax.Model]) -> None:
    """Tokens, forwards and rewritten tokens of a batch whose rows the pipeline decoded one by one."""
    rows = DECODES[case.name]["rows"]
    result = herald_jax.generate(checkpoints("llada2"), [row["prompt"] for row in rows], request(case))
    wrong = [len(row["prompt"]) for row, got in zip(rows, result.tokens, strict=True) if got != row["tokens"]]
    assert not wrong, f"other tokens than the pipeline's for prompts of length {wrong}"
    assert result.errors == {}
    if case.editing is not None and not case.stop:
        # The pipeline finishes the last block, and so does editing. The forward that changes nothing is the commit;
        # only a block that was still being rewritten when its post steps ran out takes one more.
        assert result.stats.edited_tokens == sum(row["edited"] for row in rows)
        assert result.stats.forwards == sum(row["calls"] + row["cut_off"] for row in rows)


def test_sdar_decoding(checkpoints: functools.partial[herald_jax.Model]) -> None:
    """SDAR-MoE by SDAR's own sampler, restated; a last block is denoised no further than the limit, as there."""
    rows = json.loads((DATA / "sdar_decodes.json").read_text())
    asked = GenerateConfig(max_new_tokens=20, policy=Threshold(SDAR_THRESHOLD), ignore_stop=True)
    result = herald_jax.generate(checkpoints("sdar-moe"), [row["prompt"] for row in rows], asked)
    assert result.tokens == [row["tokens"] for row in rows]
    assert result.stats.denoise_steps == sum(row["passes"] for row in rows)


def test_the_cases_decide_something() -> None:
    assert all(len({token for row in DECODES[case.name]["rows"] for token in row["tokens"]}) > 15 for case in CASES)
    assert all(sum(row["edited"] for row in DECODES[c.name]["rows"]) > 10 for c in CASES if c.editing is not None)
    for case in CASES:
        ends = {len(row["tokens"]) for row in DECODES[case.name]["rows"]}
        assert (len(ends) > 2) == case.stop, case.name
    cut_off = {sum(row["cut_off"] for row in DECODES[case.name]["rows"]) for case in CASES if case.editing is not None}
    assert 0 in cut_off
    assert max(cut_off) > 0
    assert not any(MASK in row["tokens"] for case in CASES for row in DECODES[case.name]["rows"])


@pytest.mark.parametrize(
    ("plan", "case"),
    [
        (herald_jax.Mage(1.0), "editing-0.9"),
        pytest.param(herald_jax.Herald(1.0), "editing-0.9", marks=pytest.mark.once),
    ],
    ids=["mage", "herald"],
)
def test_a_budget_of_everything_is_dense(
    plan: herald_jax.Mage | herald_jax.Herald, case: str, checkpoints: functools.partial[herald_jax.Model]
) -> None:
    rows = DECODES[case]["rows"]
    asked = request(next(c for c in CASES if c.name == case))
    result = herald_jax.generate(checkpoints("llada2"), [row["prompt"] for row in rows], asked, plan)
    assert result.tokens == [row["tokens"] for row in rows]
    assert result.stats.edited_tokens == sum(row["edited"] for row in rows)


def test_on_a_mesh(checkpoints: functools.partial[herald_jax.Model]) -> None:
    """Experts' widths over "model", rows over "data": every device has a part of every expert."""
    one = checkpoints("llada2")
    mesh = herald_jax.make_mesh(model=2, data=2)
    model = herald_jax.Model.from_params(one.config, one.params, mesh=mesh)
    parts = {s.data.shape for s in model.params["layers"]["2"]["mlp"]["experts"]["gate_up"].addressable_shards}
    assert parts == {(16, 32, 2, 6)}
    rows = DECODES["editing-stop"]["rows"]
    result = herald_jax.generate(model, [row["prompt"] for row in rows], request(CASES[-1]))
    assert result.tokens == [row["tokens"] for row in rows]


def test_chat_template_comes_with_the_tokenizer(checkpoints: functools.partial[herald_jax.Model]) -> None:
    text = checkpoints("llada2").tokenizer.chat([{"role": "user", "content": "Why?"}])
    tags = (
        "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>Why?<|role_end|><role>ASSISTANT</role>"
    )
    assert text == tags
