"""Record the oracle values of mixtures of experts: `python -m tests.oracles.moe [checkpoints|logits|decodes ...]`.

Writes, under tests/oracles/moe_data:

* `llada2/`, `sdar-moe/`   tiny random checkpoints in their families' published spelling, every routing feature on
* `logits.npz`             f32[N, V] of one block-causal pass of transformers' Glm4Moe and Qwen3Moe
* `routing.npz`            block routing (LLaDA2.2), restated in torch from SGLang's description of it
* `decodes.json`           `moe_cases.CASES` by diffusers' LLaDA2Pipeline and BlockRefinementScheduler
* `sdar_decodes.json`      SDAR's sampler as `samplers.sdar` restates it, over the SDAR-MoE checkpoint

Needs torch and transformers (the `oracle` extra), for decodes diffusers 0.42 too. `test_moe_live.py` compares.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections import Counter
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.oracles import zoo
from tests.oracles.cases import Policy
from tests.oracles.moe_cases import (
    BLOCK,
    CASES,
    DATA,
    MARGIN,
    MASK,
    SDAR_LENGTHS,
    SDAR_THRESHOLD,
    VOCAB,
    Case,
    logits_ids,
    prompts,
)
from tests.oracles.samplers import Margins, block_causal_mask, full_logits, sdar

ATTEMPTS = 400
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE, EXPERT = 32, 4, 2, 16, 40, 12
NAMES = ("llada2", "sdar-moe")

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "moe_intermediate_size": EXPERT,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 3,
}
_LLADA2 = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_SDAR = {
    "num_hidden_layers": 2,
    "num_experts": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_EXPERTS = 16  # LLaDA2's
_TOKENS = {"bos_token_id": zoo.END_OF_TEXT, "eos_token_id": zoo.IM_END, "pad_token_id": None}

# LLaDA2's chat format: its role tags are plain text to the template, one token each to its tokenizer.
ROLES = (
    "{% if messages[0]['role'] != 'system' %}<role>SYSTEM</role>detailed thinking off<|role_end|>{% endif %}"
    "{% for message in messages %}<role>{{ {'system': 'SYSTEM', 'user': 'HUMAN', 'assistant': 'ASSISTANT'}"
    "[message['role']] }}</role>{{ message['content'] }}<|role_end|>{% endfor %}"
    "{% if add_generation_prompt %}<role>ASSISTANT</role>{% endif %}"
)


def _empty(name: str) -> PreTrainedModel:
    """transformers' model that computes what the checkpoint's own code would, with unset weights."""
    common = {**_SHARED, **_TOKENS, "attn_implementation": "eager"}
    if name == "sdar-moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **_SDAR, rope_theta=1e6, attention_bias=False))
    else:
        fields = {"n_routed_experts": _EXPERTS, "n_shared_experts": 1, "use_qk_norm": True, "num_mtp_layers": 0}
        model = Glm4MoeForCausalLM(
            Glm4MoeConfig(
                **common, **_LLADA2, **fields, rope_theta=6e5, partial_rotary_factor=0.5, attention_bias=False
            )
        )
    return model.to(torch.float32).eval()


def build(name: str) -> PreTrainedModel:
    """A model with random weights that spread the top probability over most of (0, 1); see `zoo`."""
    model = _empty(name)
    generator = torch.Generator().manual_seed(NAMES.index(name))

    def normal(shape: torch.Size, scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator)

    gains = {"q_proj": 1.7, "k_proj": 1.7, "v_proj": 1.0, "o_proj": 2.0, "gate_up_proj": 1.3, "gate_proj": 1.5}
    gains |= {"up_proj": 1.0, "down_proj": 2.0, "gate": 1.5}
    biases = [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for path, parameter in (*model.named_parameters(), *biases):
            *_, owner, leaf = path.split(".")
            if leaf == "e_score_correction_bias":
                parameter.copy_(normal(parameter.shape, 0.3))
            elif owner == "embed_tokens":
                parameter.copy_(normal(parameter.shape, 1.0))
                parameter[MASK] *= 0.1
            elif owner == "lm_head":
                parameter.copy_(normal(parameter.shape, HIDDEN**-0.5))
            elif owner == "norm":
                parameter.copy_(6.0 * (1 + normal(parameter.shape, 0.1)))
            elif owner in ("q_norm", "k_norm"):
                parameter.copy_(1.7 * (1 + normal(parameter.shape, 0.1)))
            elif owner.endswith("layernorm"):
                parameter.copy_(1 + normal(parameter.shape, 0.1))
            else:
                gain = gains[leaf if owner == "experts" else owner]
                parameter.copy_(normal(parameter.shape, gain * parameter.shape[-1] ** -0.5))
    return model


def published_config(name: str) -> dict[str, Any]:
    """config.json in its family's spelling."""
    config = {**_SHARED, "hidden_act": "silu", "torch_dtype": "float32", "rope_scaling": None, "block_size": BLOCK}
    if name == "sdar-moe":
        return config | _SDAR | {
            "architectures": ["SDARMoeForCausalLM"],
            "model_type": "sdar_moe",
            "auto_map": {"AutoModelForCausalLM": "modeling_sdar_moe.SDARMoeForCausalLM"},
            "attention_bias": False,
            "rope_theta": 1e6,
            "mask_token_id": MASK,
            "eos_token_id": zoo.IM_END,
        }  # fmt: skip
    return config | _LLADA2 | {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "auto_map": {"AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM"},
        "num_experts": _EXPERTS,
        "num_shared_experts": 1,
        "score_function": "sigmoid",
        "router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "norm_head": False,
        "norm_softmax": False,
        "use_bias": False,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "rope_theta": 600000,
        "partial_rotary_factor": 0.5,
        "rotary_dim": HEAD_DIM // 2,
        "eos_token_id": zoo.IM_END,
        "pad_token_id": zoo.IM_END,
    }  # fmt: skip


def to_published(name: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as published: one per expert and matrix; LLaDA2's own names and fused q, k and v."""
    found: dict[str, torch.Tensor] = {}
    for path, value in state.items():
        layer, _, leaf = path.rpartition(".mlp.experts.")
        if not layer:
            found[path] = value
            continue
        for expert, matrix in enumerate(value):
            parts = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            for part, tensor in parts if leaf == "gate_up_proj" else [(leaf, matrix)]:
                found[f"{layer}.mlp.experts.{expert}.{part}.weight"] = tensor
    if name == "llada2":
        for path in [p for p in found if p.endswith(".q_proj.weight")]:
            rows = [found.pop(path.replace(".q_proj.", f".{n}_proj.")) for n in "qkv"]
            found[path.replace(".self_attn.q_proj.", ".attention.query_key_value.")] = torch.cat(rows)
        renames = {
            "embed_tokens": "word_embeddings",
            "self_attn.o_proj": "attention.dense",
            "self_attn.q_norm": "attention.query_layernorm",
            "self_attn.k_norm": "attention.key_layernorm",
            "e_score_correction_bias": "expert_bias",
        }
        for theirs, ours in renames.items():
            found = {path.replace(theirs, ours): value for path, value in found.items()}
    return {path: value.contiguous().clone() for path, value in found.items()}


def write(name: str, model: PreTrainedModel, data: Any = DATA) -> None:
    """Land `model` as the Hugging Face directory data/name."""
    directory = data / name
    directory.mkdir(parents=True, exist_ok=True)
    save_file(to_published(name, model.state_dict()), directory / "model.safetensors", metadata={"format": "pt"})
    template = ROLES if name == "llada2" else zoo.CHATML
    tokenizer = {"eos_token": "<|im_end|>", "mask_token": "<|mask|>", "chat_template": template}
    for file, value in (("config.json", published_config(name)), ("tokenizer_config.json", tokenizer)):
        (directory / file).write_text(json.dumps(value, indent=1) + "\n")
    zoo.tiny_tokenizer("<|mask|>").save(str(directory / "tokenizer.json"), pretty=False)


@torch.no_grad()
def block_routing(logits: torch.Tensor, bias: torch.Tensor, block: int, capacity: int, k: int) -> torch.Tensor:
    """LLaDA2.2's routing of f32[N, X] logits, restated: f32[N, X], each token's weight for each expert, unscaled.

    After the description and reference in SGLang's pull request 31768: the experts open to a block are those whose best
    corrected score over the block's tokens is highest; a token's experts are the best of them by its own corrected
    score; their weights are the uncorrected scores, renormalised. The lower number wins a tie.
    """
    weights = torch.zeros_like(logits)
    for start in range(0, len(logits), block):
        scores = torch.sigmoid(logits[start : start + block])
        corrected = scores + bias
        best = [float(column.max()) for column in corrected.T]
        pool = sorted(range(len(best)), key=lambda expert: (-best[expert], expert))[:capacity]
        for token, row in enumerate(corrected):
            chosen = sorted(pool, key=lambda expert: (-float(row[expert]), expert))[:k]
            total = sum(float(scores[token, expert]) for expert in chosen) + 1e-20
            for expert in chosen:
                weights[start + token, expert] = float(scores[token, expert]) / total
    return weights


def record_routing() -> dict[str, np.ndarray]:
    """The content of routing.npz: `block_routing` of 3 blocks of 8 tokens, 12 of 32 experts a block, 4 a token."""
    generator = np.random.default_rng(31768)
    logits = generator.normal(0, 2, (24, 32)).astype(np.float32)
    logits[3] = logits[3, 0]  # a token to which all experts are equal
    bias = generator.normal(0, 0.1, 32).astype(np.float32)
    weights = block_routing(torch.from_numpy(logits), torch.from_numpy(bias), 8, 12, 4)
    return {"logits": logits, "bias": bias, "weights": weights.numpy()}


class _Watched(torch.nn.Module):
    """The model as the pipeline wants it: block-causal. Remembers what each call saw and said of the last block."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.calls: list[tuple[int, list[int], torch.Tensor]] = []

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor) -> Any:
        assert attention_mask.all(), "lengths must be whole blocks, or the pipeline hides the last block's tail"
        mask = block_causal_mask(position_ids[0], position_ids[0], BLOCK)
        out = self.model(ids, attention_mask=mask, position_ids=position_ids, use_cache=False)
        self.calls.append((ids.shape[1], ids[0, -BLOCK:].tolist(), out.logits[0, -BLOCK:]))
        return out


def _margins(case: Case, calls: list[tuple[int, list[int], torch.Tensor]]) -> Margins:
    """How narrowly the calls' decisions were taken (a prompt's own tokens count too, as if they could be edited)."""
    margins = Margins()
    for _, ids, logits in calls:
        best = torch.topk(logits, 2)
        sure = torch.softmax(logits, dim=-1).max(dim=-1).values
        masked = [position for position in range(BLOCK) if ids[position] == MASK]
        known = [position for position in range(BLOCK) if ids[position] != MASK]
        ranks = sorted((float(sure[p]) for p in masked), reverse=True)
        for position in masked:
            margins.reveal = min(margins.reveal, abs(float(sure[position]) - case.threshold))
        margins.reveal = min([margins.reveal, *(a - b for a, b in itertools.pairwise(ranks))])
        for position in masked if case.editing is None else range(BLOCK):
            if int(best.indices[position, 0]) == MASK:
                return Margins(0.0, 0.0)  # a mask predicted as a token is a hole to the pipeline: not comparable
            margins.token = min(margins.token, float(best.values[position, 0] - best.values[position, 1]))
        for position in known if case.editing is not None else ():
            if int(best.indices[position, 0]) != ids[position]:
                margins.reveal = min(margins.reveal, abs(float(sure[position]) - case.editing))
    return margins


@dataclasses.dataclass
class Decoded:
    """One prompt by the pipeline.

    Attributes:
      tokens: the new ones. calls: of the model. edited: how many tokens were rewritten.
      cut_off: blocks that were still being rewritten at their last call.
      margin: the narrowest decision.
    """

    tokens: list[int]
    calls: int
    edited: int
    cut_off: int
    margin: float


def decode(model: PreTrainedModel, case: Case, prompt: list[int], stop: int | None) -> Decoded:
    """`prompt` continued by diffusers' own pipeline."""
    from diffusers import BlockRefinementScheduler, LLaDA2Pipeline

    watched = _Watched(model)
    pipeline = LLaDA2Pipeline(model=watched, scheduler=BlockRefinementScheduler(block_length=BLOCK))
    pipeline.set_progress_bar_config(disable=True)
    edits: list[int] = []

    def count(pipe: Any, step: int, timestep: int, values: dict[str, Any]) -> dict[str, Any]:
        edits.append(int(values["editing_transfer_index"].sum()))
        return {}

    end = math.ceil((len(prompt) + case.max_new_tokens) / BLOCK) * BLOCK
    out = pipeline(
        input_ids=torch.tensor([prompt]),
        gen_length=end - len(prompt),
        num_inference_steps=case.steps,
        temperature=0.0,
        sampling_method="greedy",
        threshold=case.threshold,
        editing_threshold=case.editing,
        max_post_steps=case.max_post_steps,
        eos_early_stop=stop is not None,
        eos_token_id=stop,
        mask_token_id=MASK,
        output_type="seq",
        callback_on_step_end=count,
        callback_on_step_end_tensor_inputs=["editing_transfer_index"],
    )
    tokens = out.sequences[0].tolist()[: case.max_new_tokens]
    if stop in tokens:
        tokens = tokens[: tokens.index(stop) + 1]
    margins = _margins(case, watched.calls)
    calls = zip(watched.calls, edits, strict=True)
    last_calls = {length: MASK not in ids and edited > 0 for (length, ids, _), edited in calls}  # of each block
    return Decoded(tokens, len(edits), sum(edits), sum(last_calls.values()), min(margins.token, margins.reveal))


def record_case(model: PreTrainedModel, case: Case) -> dict[str, Any]:
    """All rows of a case, each the first candidate prompt that is decided clearly throughout."""
    stop = None
    if case.stop:
        free = [decode(model, case, next(prompts(case, n, row)), None) for row, n in enumerate(case.lengths)]
        counts = Counter(token for result in free for token in set(result.tokens[2:]))
        stop = counts.most_common(3)[2][0]  # neither the commonest, which would end every row at once, nor a rare one
    rows = []
    for row, length in enumerate(case.lengths):
        for prompt in itertools.islice(prompts(case, length, row), ATTEMPTS):
            if stop in prompt:
                continue  # the pipeline takes a prompt's own end-of-text for the answer's
            found = decode(model, case, prompt, stop)
            if found.margin > MARGIN:
                rows.append({"prompt": prompt, **dataclasses.asdict(found)})
                break
        else:
            raise RuntimeError(f"{case.name}: no prompt of length {length} is decided clearly in {ATTEMPTS} attempts")
    return {"stop": stop, "rows": rows}


def record_sdar() -> list[dict[str, Any]]:
    """The content of sdar_decodes.json: rows by SDAR's dynamic policy, threshold `SDAR_THRESHOLD`."""
    model, rows = build("sdar-moe"), []
    policy = Policy("threshold", threshold=SDAR_THRESHOLD)
    for row, length in enumerate(SDAR_LENGTHS):
        for prompt in itertools.islice(prompts(CASES[0], length, row), ATTEMPTS):
            found = sdar(
                model, prompt, mask_id=MASK, block_length=BLOCK, policy=policy, max_new_tokens=CASES[0].max_new_tokens
            )
            if min(found.margins.token, found.margins.reveal) > MARGIN and MASK not in found.written:
                rows.append({"prompt": prompt, "tokens": found.tokens, "passes": found.passes})
                break
        else:
            raise RuntimeError(f"no prompt of length {length} is decided clearly in {ATTEMPTS} attempts")
    return rows


def record_logits() -> dict[str, np.ndarray]:
    """The content of logits.npz."""
    return {name: full_logits(build(name), logits_ids(name), BLOCK).numpy() for name in NAMES}


def main(parts: list[str]) -> None:
    """Record the named parts, or all."""
    torch.set_num_threads(1)
    known = ("checkpoints", "logits", "routing", "sdar", "decodes")
    if unknown := set(parts) - set(known):
        raise SystemExit(f"unknown part {sorted(unknown)}: choose from {', '.join(known)}")
    chosen = parts or list(known)
    if "checkpoints" in chosen:
        for name in NAMES:
            write(name, build(name))
    if "logits" in chosen:
        np.savez_compressed(DATA / "logits.npz", **record_logits())
    if "routing" in chosen:
        np.savez_compressed(DATA / "routing.npz", **record_routing())
    if "sdar" in chosen:
        (DATA / "sdar_decodes.json").write_text(json.dumps(record_sdar(), separators=(",", ":")) + "\n")
    if "decodes" in chosen:
        model, recorded = build("llada2"), {}
        for case in CASES:
            recorded[case.name] = record_case(model, case)
            rows = recorded[case.name]["rows"]
            said = {token for row in rows for token in row["tokens"]}
            print(
                f"{case.name}: {len(said)} distinct tokens, {sum(row['calls'] for row in rows)} calls, "
                f"{sum(row['edited'] for row in rows)} edits, lengths {[len(row['tokens']) for row in rows]}",
                flush=True,
            )
        # One row a line, so that a row's change is one line of a diff.
        text = json.dumps(recorded, separators=(",", ":"))
        (DATA / "decodes.json").write_text(text.replace('{"prompt"', '\n{"prompt"').replace("]},", "]},\n") + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
