"""What went wrong for people who ran block-diffusion models elsewhere, asked of this path (the dense block loop).

Each test names the public report. Some kinds of fault are asked in other files, against recorded values: every prompt
remainder, prefixes of 0, 1, M-1, M, M+1 and 2M tokens, mask tokens in the prompt, the static policy with fewer masks
than its share, many blocks past the cache's first sizes (test_generate_oracle.py); tied and untied heads
(JetAstra/SDAR#8, test_model_oracle.py).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import herald_jax
from convert.converter import convert
from herald_jax import GenerateConfig, GenerationError, HeraldError, Model
from herald_jax.denoise import HEAD_ROWS, Sampling, Sequential, StaticLowConfidence, Threshold, draw, predict
from tests.herald_jax import plain
from tests.oracles import cases

ORACLES = pathlib.Path(__file__).parents[1] / "oracles" / "data"
DECODES: dict[str, Any] = json.loads((ORACLES / "decodes.json").read_text())["cases"]
Get = Callable[..., Model]

NEW = 21
ROWS = 6  # of every batch: one shape, one compiled loop
GREEDY: dict[str, Any] = {}
SAMPLED = {"temperature": 0.9, "top_p": 0.85, "top_k": 40}
# Family form: model, block length, small block length, options, prompt lengths around the block length.
FORMS: dict[str, tuple[str, int, int, dict[str, Any], tuple[int, ...]]] = {
    "sdar": ("sdar", 4, 4, {}, (1, 3, 4, 5, 8, 14)),
    "fast-dllm-v2": ("fast-dllm-v2", 8, 4, {"block_cache": True}, (1, 7, 8, 9, 16, 20)),
}
PROGRAMS = [(form, how) for form in FORMS for how in ("greedy", "sampled")]


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, length).tolist() for length in lengths]


class Program:
    """One compiled loop of this file: a model, its batch of prompts, and a request that only traced numbers vary."""

    def __init__(self, get: Get, form: str, how: str):
        name, self.block, small, options, lengths = FORMS[form]
        self.model = get(name, self.block, small)
        self.prompts = prompts(lengths)
        self.keys = jax.random.split(jax.random.key(5), len(lengths))
        sampling = {"greedy": GREEDY, "sampled": SAMPLED}[how]
        self.request = GenerateConfig(NEW, Threshold(0.7), ignore_stop=True, **options, **sampling)

    def run(self, rows: list[list[int]], keys: jax.Array, **changes: Any) -> list[list[int]]:
        request = dataclasses.replace(self.request, **changes)
        return herald_jax.generate(self.model, rows, request, keys=keys).tokens

    @functools.cached_property
    def tokens(self) -> list[list[int]]:
        """All rows in one batch."""
        return self.run(self.prompts, self.keys)


@pytest.fixture(scope="module")
def program(oracle_model: Get) -> Callable[[str, str], Program]:
    return functools.cache(functools.partial(Program, oracle_model))


Programs = Callable[[str, str], Program]


@pytest.mark.parametrize(
    ("form", "how"),
    [pytest.param(*program, marks=[pytest.mark.once] if "sampled" in program else []) for program in PROGRAMS],
)
def test_rows_do_not_depend_on_their_neighbours(form: str, how: str, program: Programs) -> None:
    """NVlabs/Fast-dLLM#39, #57, #7, ZHZisZZ/dllm#3, #15: alone, in a batch, among others: same tokens.

    With sampling this is also Fast-dLLM#64: a batch draws what its rows draw alone with the same keys.
    """
    p = program(form, how)
    assert len({tuple(row) for row in p.tokens}) == len(p.tokens)
    if how == "sampled":  # greedy rows alone: test_generate_oracle.py::test_batch_of_one
        for row, (prompt, expected) in enumerate(zip(p.prompts, p.tokens, strict=True)):
            assert p.run([prompt], p.keys[row : row + 1]) == [expected]
    backwards = p.run(p.prompts[::-1], p.keys[::-1])
    assert backwards == p.tokens[::-1]
    among_others = p.run(
        [p.prompts[2], *prompts((13, 2, 16, 6), seed=9), p.prompts[4]], p.keys[jnp.array([2, 0, 1, 3, 5, 4])]
    )
    assert [among_others[0], among_others[-1]] == [p.tokens[2], p.tokens[4]]


@pytest.mark.parametrize("form", FORMS)
def test_keys_matter_only_when_sampling(form: str, program: Programs) -> None:
    other = jax.random.split(jax.random.key(6), len(FORMS[form][-1]))
    greedy, sampled = program(form, "greedy"), program(form, "sampled")
    assert greedy.run(greedy.prompts, other) == greedy.tokens
    assert all(a != b for a, b in zip(sampled.run(sampled.prompts, other), sampled.tokens, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_rows_finish_at_different_steps(form: str, program: Programs) -> None:
    """NVlabs/Fast-dLLM#33 and its row-0 stop rule: each row ends with its own first stop token."""
    p = program(form, "greedy")
    ends = set()
    for row, index in ((0, 0), (1, 6), (3, 1), (4, 10)):
        stop = p.tokens[row][index]
        expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in p.tokens]
        assert p.run(p.prompts, p.keys, ignore_stop=False, stop_token_ids=(stop,)) == expected
        ends |= {len(tokens) for tokens in expected}
    assert len(ends) > 4
    assert {1, NEW} <= ends


def test_stop_token_in_the_prompt_is_data(program: Programs) -> None:
    """The remainder of a prompt shares a block with new tokens, but only a new token can end the row."""
    p = program("sdar", "greedy")
    absent = next(token for token in range(256) if all(token not in row for row in p.tokens))
    rows = [[*prompt[:-1], absent] for prompt in p.prompts]
    free = p.run(rows, p.keys)
    assert all(absent not in row for row in free)
    assert p.run(rows, p.keys, ignore_stop=False, stop_token_ids=(absent,)) == free


@pytest.mark.parametrize(("form", "how"), PROGRAMS)
def test_the_padded_tail_is_never_seen(form: str, how: str, program: Programs) -> None:
    """huggingface/diffusers#13598: a shorter answer is the beginning of the longer one, wherever it ends."""
    p = program(form, how)
    for new in range(1, 2 * p.block + 2):
        assert p.run(p.prompts, p.keys, max_new_tokens=new) == [row[:new] for row in p.tokens]


@pytest.mark.parametrize(("form", "how"), PROGRAMS)
def test_a_committed_block_is_prefix(form: str, how: str, program: Programs) -> None:
    """sgl-project/sglang#22819 and its like: going on from a prompt that ends where a block ended repeats the rest.

    So what the loop commits is what prefill writes, for prefixes of one block and more, also exactly one.
    """
    p = program(form, how)
    for blocks in (1, 2, 3):
        ends = [(len(prompt) // p.block + blocks) * p.block for prompt in p.prompts]
        cuts = [min(end - len(prompt), NEW - 1) for end, prompt in zip(ends, p.prompts, strict=True)]
        longer = [prompt + row[:cut] for prompt, row, cut in zip(p.prompts, p.tokens, cuts, strict=True)]
        again = p.run(longer, p.keys, max_new_tokens=NEW)
        for row, cut, end, prompt in zip(range(len(cuts)), cuts, ends, p.prompts, strict=True):
            if len(prompt) + cut == end:
                assert again[row][: NEW - cut] == p.tokens[row][cut:], (blocks, len(prompt))


def test_counts(oracle_model: Get) -> None:
    """NVlabs/Fast-dLLM#81: the report has forwards, tokens per forward and steps per block, with the right values."""
    rows = DECODES["sdar-4/threshold-0.9"]["rows"][:ROWS]
    result = herald_jax.generate(
        oracle_model("sdar"), [row["prompt"] for row in rows], GenerateConfig(14, Threshold(0.9), ignore_stop=True)
    )
    passes = [row["passes"] for row in rows]
    blocks = [-(-(len(row["prompt"]) + 14) // 4) - len(row["prompt"]) // 4 for row in rows]
    stats = result.stats
    assert (stats.rows, stats.prompt_tokens, stats.new_tokens) == (
        len(rows),
        sum(len(row["prompt"]) for row in rows),
        14 * len(rows),
    )
    # The last block of a row needs no commit.
    assert (stats.denoise_steps, stats.blocks) == (sum(passes), sum(blocks))
    assert stats.commits == sum(blocks) - len(rows)
    assert stats.forwards == stats.denoise_steps + stats.commits
    assert stats.batch_forwards == max(p + b - 1 for p, b in zip(passes, blocks, strict=True))
    assert stats.tokens_per_forward == pytest.approx(14 * len(rows) / stats.forwards)
    assert stats.steps_per_block == pytest.approx(sum(passes) / sum(blocks))
    itemsize, layers, kv_heads, head_dim = 4, 2, 2, 16
    assert stats.kv_bytes % (2 * layers * len(rows) * kv_heads * head_dim * itemsize) == 0


def test_chat_template_is_the_checkpoints(tmp_path: pathlib.Path) -> None:
    """InternLM/lmdeploy#3922: two checkpoints of one architecture, two templates."""
    shutil.copytree(ORACLES / "sdar", tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer_config.json"
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    convert(tmp_path / "hf", tmp_path / "model")
    chat = herald_jax.load(tmp_path / "model").tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert chat == "[user] Hi\n[assistant]"


def test_mask_token_typed_as_text(oracle_model: Get) -> None:
    """sgl-project/sglang#31773, #35998: a literal mask token in a text prompt is data."""
    model = oracle_model("sdar")
    rows = [row["prompt"] for row in DECODES["sdar-4/mask-in-prompt"]["rows"][-ROWS:]]
    assert all(prompt.count(cases.MASK) == 2 for prompt in rows)
    texts = ["".join("<|MASK|>" if t == cases.MASK else chr(97 + t % 26) for t in prompt) for prompt in rows]
    ids = [model.tokenizer.encode(text) for text in texts]
    for prompt, encoded in zip(rows, ids, strict=True):
        assert [t == cases.MASK for t in encoded] == [t == cases.MASK for t in prompt]
    request = GenerateConfig(14, Threshold(0.6), ignore_stop=True)
    result = herald_jax.generate(model, texts, request)
    expected = [plain.decode(model, prompt, None, request) for prompt in ids]
    assert result.tokens == [row.tokens for row in expected]
    # A typed mask that was taken for a hole would take a step of its own.
    assert result.stats.denoise_steps == sum(sum(row.steps) for row in expected)
    assert result.texts == [model.tokenizer.decode(row.tokens) for row in expected]


def test_a_predicted_mask_token_is_a_token(program: Programs) -> None:
    """A position revealed as the mask's id is revealed: it is not denoised for ever, and it is in the answer."""
    p = program("sdar", "greedy")
    common = max(range(256), key=lambda token: sum(row.count(token) for row in p.tokens))
    # Exchange two rows of the output projection: what would be the commonest token is now the mask.
    kernel = p.model.params["head"]["kernel"]
    kernel = kernel.at[jnp.array([common, cases.MASK])].set(kernel[jnp.array([cases.MASK, common])])
    model = dataclasses.replace(p.model, params=p.model.params | {"head": {"kernel": kernel}})
    expected = [plain.decode(model, prompt, None, p.request) for prompt in p.prompts]
    assert sum(cases.MASK in row.tokens for row in expected) > 1
    result = herald_jax.generate(model, p.prompts, p.request)
    assert result.tokens == [row.tokens for row in expected]
    assert result.stats.denoise_steps == sum(sum(row.steps) for row in expected)


def test_top_k_of_one_is_greedy_with_the_raw_confidence(oracle_model: Get) -> None:
    """SDAR's generate.py: top-k filtering made every confidence 1.0, so that a threshold revealed the whole block.

    Here temperature 0 and top_k=1 are the same decode: the recorded tokens, in the recorded number of passes.
    """
    rows = DECODES["sdar-4/threshold-0.9"]["rows"][:ROWS]
    request = GenerateConfig(14, Threshold(0.9), ignore_stop=True, temperature=1.0, top_k=1)
    result = herald_jax.generate(oracle_model("sdar"), [row["prompt"] for row in rows], request)
    assert result.tokens == [row["tokens"] for row in rows]
    assert result.stats.denoise_steps == sum(row["passes"] for row in rows)
    at_once = sum(-(-(len(row["prompt"]) + 14) // 4) - len(row["prompt"]) // 4 for row in rows)
    assert result.stats.denoise_steps > 2 * at_once


def test_nucleus_of_each_row() -> None:
    """NVlabs/Fast-dLLM#64: top-p is decided by each row's own distribution (it used row 0's for all)."""
    probabilities = np.array([[0.9, 0.05, 0.03, 0.02], [0.1, 0.3, 0.2, 0.4], [0.25, 0.25, 0.25, 0.25]], np.float32)
    nuclei = [{0}, {1, 3}, {0, 1, 2}]  # of mass 0.65; a tie at the edge is in or out as a whole, see below
    draws = 400
    keys = jax.random.split(jax.random.key(0), (draws, 3))
    sampling = Sampling.of(1.0, 0, 0.65)
    tokens = np.asarray(jax.jit(jax.vmap(lambda k: draw(jnp.log(probabilities), k, sampling)))(keys))
    assert set(tokens[:, 0].tolist()) == nuclei[0]
    assert set(tokens[:, 1].tolist()) == nuclei[1]
    assert nuclei[2] <= set(tokens[:, 2].tolist())
    share = np.mean(tokens[:, 1] == 3)
    assert abs(share - 0.4 / 0.7) < 0.08  # 3.2 standard deviations


@pytest.mark.parametrize("left", range(5))
def test_no_policy_reveals_more_than_is_masked(left: int) -> None:
    """SDAR's generate.py: a static share larger than the masks left overwrote known positions."""
    eligible = jnp.arange(6)[None, :] >= 6 - left
    shown = {"eligible": eligible, "confidence": jnp.full((1, 6), 0.5), "entropy": jnp.full((1, 6), 1.0)}
    for policy in (
        StaticLowConfidence(1),
        Threshold(0.9, steps=1),
        Sequential(1),
        herald_jax.EntropyBound(0.0, steps=1),
    ):
        revealed = policy(**shown, step=jnp.zeros(1, jnp.int32), block_length=6)
        np.testing.assert_array_equal(revealed, eligible, err_msg=repr(policy))


def test_unset_steps_are_one_token_a_step() -> None:
    """LMDeploy: denoising steps left unset divided by None. Here None has one meaning, and nonsense is refused."""
    shown = {"confidence": jnp.array([[0.3, 0.9, 0.5, 0.7]]), "entropy": jnp.array([[4.0, 1.0, 3.0, 2.0]])}
    for step in (0, 3, 9):
        for policy, expected in (
            (StaticLowConfidence(), 1),
            (Threshold(0.95), 1),
            (herald_jax.EntropyBound(0.5), 1),
            (Sequential(), 0),
        ):
            revealed = policy(
                eligible=jnp.ones((1, 4), bool), step=jnp.full(1, step, jnp.int32), block_length=4, **shown
            )
            assert jnp.flatnonzero(revealed[0]).tolist() == [expected], policy
    for policy_class in (StaticLowConfidence, Sequential, Threshold, herald_jax.EntropyBound):
        for steps in (0, -1, 2.5, "4"):
            with pytest.raises(GenerationError, match="steps is"):
                policy_class(steps=steps)


def test_vocabulary_rows_are_computed_in_chunks() -> None:
    """vllm-project/vllm#50699: no array of all positions by the whole vocabulary exists, and chunks change no value."""
    batch, length, size, vocab = 5, 96, 8, 50
    assert batch * length > HEAD_ROWS
    hidden = jax.random.normal(jax.random.key(0), (batch, length, size))
    kernel = jax.random.normal(jax.random.key(1), (vocab, size))
    keys = jax.random.split(jax.random.key(2), (batch, length))
    jitted = jax.jit(predict)
    for sampling, used in ((Sampling.of(0.0, 0, 1.0), None), (Sampling.of(0.7, 9, 0.8), keys)):
        whole = jitted(hidden, kernel, sampling, used)
        for row in range(batch):
            part = jitted(hidden[row : row + 1], kernel, sampling, None if used is None else used[row : row + 1])
            jax.tree.map(lambda a, b, row=row: np.testing.assert_allclose(a[row], b[0], rtol=1e-6), whole, part)
        text = str(jax.make_jaxpr(lambda h, k, s=sampling: predict(h, kernel, s, k))(hidden, used))
        assert f"f32[{HEAD_ROWS},{vocab}]" in text
        assert f"f32[{2 * HEAD_ROWS},{vocab}]" not in text
        assert f"f32[{batch * length},{vocab}]" not in text
    logits = np.einsum("bte,ve->btv", hidden, kernel)
    greedy = jitted(hidden, kernel, Sampling.of(0.0, 0, 1.0))
    np.testing.assert_array_equal(greedy.token, logits.argmax(-1))
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    np.testing.assert_allclose(greedy.confidence, weights.max(-1) / weights.sum(-1), rtol=1e-5)


def test_mask_id_is_never_guessed(tmp_path: pathlib.Path) -> None:
    """Diffulex: one global mask id for every model. Here a checkpoint that does not state its own is refused."""
    shutil.copytree(ORACLES / "sdar", tmp_path / "hf")
    for file, name in (("config.json", "mask_token_id"), ("tokenizer_config.json", "mask_token")):
        path = tmp_path / "hf" / file
        values = json.loads(path.read_text())
        del values[name]
        path.write_text(json.dumps(values))
    with pytest.raises(HeraldError, match="--mask-token-id"):
        convert(tmp_path / "hf", tmp_path / "model")
    assert not (tmp_path / "model").exists()
