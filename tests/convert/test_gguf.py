"""GGUF sources: restored weights against the format's formulas, un-permuted rows, rebuilt files, and refusals."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from convert.converter import SourceProblems, convert
from convert.gguf import GGUFSource, hugging_face_name, unpermute
from convert.gguf_header import read_header
from herald_jax.checkpoint import load_checkpoint
from herald_jax.errors import ConversionError
from herald_jax.hf_config import Overrides
from herald_jax.model import flatten
from herald_jax.text import load_tokenizer

gguf = pytest.importorskip("gguf", reason="needs the gguf package (herald-jax[gguf])")

E, HEADS, KV, D, F, LAYERS = 64, 4, 2, 16, 96, 2
# A byte-level vocabulary with two merges and three special tokens.
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*BYTES, "he", "llo", "ll", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "ll o"]
EOS = len(TOKENS) - 1
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights by their llama.cpp names (q and k in llama.cpp's row order)."""
    draw = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), E), "output_norm.weight": (E,)}
    for i in range(LAYERS):
        layer = f"blk.{i}."
        shapes |= {f"{layer}attn_norm.weight": (E,), f"{layer}ffn_norm.weight": (E,)}
        shapes |= {f"{layer}attn_q.weight": (HEADS * D, E), f"{layer}attn_k.weight": (KV * D, E)}
        shapes |= {f"{layer}attn_v.weight": (KV * D, E), f"{layer}attn_output.weight": (E, HEADS * D)}
        shapes |= {f"{layer}ffn_{n}.weight": (F, E) for n in ("gate", "up")} | {f"{layer}ffn_down.weight": (E, F)}
    return {name: draw.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    path: Path,
    arrays: dict[str, np.ndarray] | None = None,
    *,
    kind: str = "F32",
    architecture: str = "llama",
    metadata: Callable[[Any], None] = lambda writer: None,
    pre: str = "smollm",
    tokenizer: str = "gpt2",
) -> Path:
    """A small Llama; matrices are stored as `kind`, vectors as F32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(E)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(F)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(D)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 3) + [3] * 3)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(EOS - 1)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(EOS)
    writer.add_chat_template(TEMPLATE)
    metadata(writer)
    for name, array in (weights() if arrays is None else arrays).items():
        quantisation = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        data = gguf.quants.quantize(array, quantisation)
        writer.add_tensor(name, data, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def restored(array: np.ndarray, kind: str) -> np.ndarray:
    """What a value becomes by storing it: ggml's block formulas, on blocks of 32 along the row."""
    if kind == "F32":
        return array
    if kind == "F16":
        return array.astype(np.float16).astype(np.float32)
    blocks = array.reshape(-1, 32)
    if kind == "Q8_0":  # x = d * q, q in -127..127
        scale = np.abs(blocks).max(axis=1, keepdims=True) / 127
        quants = np.round(blocks / scale)
        return (scale.astype(np.float16).astype(np.float32) * quants).reshape(array.shape)
    low, high = blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True)
    scale = (high - low) / 15  # Q4_1: x = d * q + m, q in 0..15
    quants = np.clip(np.floor((blocks - low) / scale + 0.5), 0, 15)
    scale, low = scale.astype(np.float16).astype(np.float32), low.astype(np.float16).astype(np.float32)
    return (scale * quants + low).reshape(array.shape)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_weights_are_restored(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "m.gguf", kind=kind)
    source = GGUFSource(path)
    try:
        assert source.problems == []
        for name, array in weights().items():
            hf = hugging_face_name(name)
            assert hf is not None
            expected = restored(array, kind) if array.ndim > 1 else array
            if "attn_q" in name or "attn_k" in name:
                expected = natural_rows(expected)
            found = source.rows(hf, 0, len(expected))
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6, err_msg=name)
            np.testing.assert_array_equal(source.rows(hf, 3, 11), found[3:11])
    finally:
        source.close()


def natural_rows(stored: np.ndarray) -> np.ndarray:
    """Row 2 i + s of a head in llama.cpp is row s D / 2 + i of the head: one row at a time."""
    out = np.empty_like(stored)
    for head in range(len(stored) // D):
        for s in range(2):
            for i in range(D // 2):
                out[head * D + s * D // 2 + i] = stored[head * D + 2 * i + s]
    return out


def test_unpermute_is_the_row_formula() -> None:
    stored = np.arange(4 * D * 3).reshape(4 * D, 3)
    np.testing.assert_array_equal(unpermute(stored, 4), natural_rows(stored))


def test_converts_to_a_checkpoint(tmp_path: Path) -> None:
    arrays = weights()
    report = convert(write(tmp_path / "m.gguf", arrays), tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out")
    c = loaded.config
    assert (c.family, c.num_heads, c.num_kv_heads, c.head_dim, c.num_layers) == ("llama", HEADS, KV, D, LAYERS)
    assert (c.rms_norm_eps, c.rope.theta, c.max_position_embeddings) == (1e-5, 1e5, 256)
    assert (c.tie_word_embeddings, c.qkv_bias, c.dtype, c.vocab_size) == (True, False, "float32", len(TOKENS))
    assert (c.diffusion.stop_token_ids, c.diffusion.pad_token_id) == ((EOS,), EOS)
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(loaded.params).items()}
    np.testing.assert_array_equal(leaves["embed/embedding"], arrays["token_embd.weight"])
    np.testing.assert_array_equal(leaves["layers/1/mlp/gate_up/kernel"][:, 1], arrays["blk.1.ffn_up.weight"].T)
    q = natural_rows(arrays["blk.0.attn_q.weight"])
    for head in range(HEADS):
        expected = q[head * D : (head + 1) * D].T
        np.testing.assert_array_equal(leaves["layers/0/attn/qkv/kernel"][:, head // 2, head % 2], expected)
    assert report.notes[:3] == (
        "configuration rebuilt from the metadata of m.gguf",
        "dtype float32 supplied for m.gguf: its weights are restored from GGUF types; store them smaller with --dtype",
        "tokenizer rebuilt from the metadata of m.gguf",
    )
    assert loaded.provenance["kind"] == "gguf"


def test_a_directory_with_one_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    write(tmp_path / "hf" / "m.gguf", kind="Q8_0")
    assert convert(tmp_path / "hf", tmp_path / "out", overrides=Overrides(dtype="bfloat16")).config.dtype == "bfloat16"
    write(tmp_path / "hf" / "n.gguf")
    with pytest.raises(ConversionError, match=r"holds 2 \.gguf files \(m\.gguf, \.\.\.\); name the one to convert"):
        convert(tmp_path / "hf", tmp_path / "out2")


def test_the_tokenizer_is_rebuilt(tmp_path: Path) -> None:
    convert(write(tmp_path / "m.gguf"), tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    ids = tokenizer.encode("hello 42<|im_end|>é")
    byte = {token: i for i, token in enumerate(TOKENS)}
    # Merges apply in order, digits stand alone, special tokens are found in the text, other characters are bytes.
    assert ids == [byte[t] for t in ("he", "llo", "Ġ", "4", "2", "<|im_end|>", "Ã", "©")]
    assert tokenizer.decode(ids, skip_special=False) == "hello 42<|im_end|>é"
    assert tokenizer.chat([{"role": "user", "content": "hi"}], add_generation_prompt=False) == (
        "<|im_start|>user\nhi<|im_end|>\n"
    )


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", ["4", "2"]), ("gpt-2", ["42"]), ("llama-bpe", ["42"])])
def test_word_rules_differ_in_digits(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    source = GGUFSource(write(tmp_path / "m.gguf", pre=pre))
    rules = json.loads((source.config_dir / "tokenizer.json").read_text())
    source.close()
    words = load_words(rules).pre_tokenize_str("42")
    assert [word for word, _ in words] == pieces


def load_words(rules: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(rules)).pre_tokenizer


def test_a_tokenizer_beside_the_file_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": []}')
    report = convert(write(tmp_path / "m.gguf", pre="unheard-of"), tmp_path / "out")
    assert "tokenizer files taken from beside m.gguf" in report.notes
    assert (tmp_path / "out/tokenizer/tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()


def test_beginning_of_text_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", metadata=lambda writer: writer.add_add_bos_token(True))
    source = GGUFSource(path)
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(source.config_dir / "tokenizer.json")).encode("he").ids
    source.close()
    assert ids == [EOS - 1, TOKENS.index("he")]


def experts(writer: Any) -> None:
    writer.add_expert_count(8)


def vocabulary(writer: Any) -> None:
    writer.add_vocab_size(7)


def dynamic(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architecture": "phi3"}, "is a GGUF model of architecture 'phi3'; only 'llama' is supported"),
        ({"metadata": experts}, "has 8 experts; mixtures are not supported yet"),
        ({"metadata": vocabulary}, f"states a vocabulary of 7, but its embedding has {len(TOKENS)} rows"),
        ({"metadata": dynamic}, "uses rope scaling 'longrope'; supported are none, linear and yarn"),
        (
            {"pre": "unheard-of"},
            "splits words by the rules of 'unheard-of', which are not known here: put the checkpoint's tokenizer.json "
            "beside the .gguf file",
        ),
        (
            {"tokenizer": "llama"},
            "has a tokenizer of type 'llama'; only byte-level BPE is rebuilt: put the checkpoint's tokenizer.json "
            "beside the .gguf file",
        ),
    ],
    ids=["architecture", "experts", "vocabulary", "rope", "words", "sentencepiece"],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    path = write(tmp_path / "m.gguf", **changes)
    with pytest.raises(ConversionError) as caught:
        convert(path, tmp_path / "out")
    assert str(caught.value) == f"{path} {sentence}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]


def test_problems_of_the_tensors_together(tmp_path: Path) -> None:
    arrays = weights()
    del arrays["blk.1.ffn_up.weight"]
    arrays["blk.0.attn_q_norm.weight"] = np.ones(D, np.float32)
    arrays["rope_freqs.weight"] = np.ones(D // 2, np.float32)
    with pytest.raises(SourceProblems) as caught:
        convert(write(tmp_path / "m.gguf", arrays), tmp_path / "out")
    assert set(caught.value.problems) == {
        "rope_freqs.weight holds rotary frequencies (Llama 3.1 and later) whose parameters GGUF does not state; "
        "convert the safetensors checkpoint instead",
        "blk.0.attn_q_norm.weight [16] is unknown to family llama",
        "model.layers.1.mlp.up_proj.weight [96, 64] is missing",
    }


def test_other_quantisations_are_named(tmp_path: Path) -> None:
    with pytest.raises(SourceProblems) as caught:
        convert(write(tmp_path / "m.gguf", kind="Q5_0"), tmp_path / "out")
    assert (
        "model.layers.0.mlp.up_proj.weight is stored as Q5_0, which cannot be converted; use unquantised weights"
        in caught.value.problems
    )


def test_the_header_is_what_the_package_reads(tmp_path: Path) -> None:
    def metadata(writer: Any) -> None:
        writer.add_array("test.nested", [[1, 2], [3]])
        writer.add_array("test.floats", [0.5, -1.0])
        writer.add_int64("test.negative", -5)
        writer.add_float64("test.double", 1e300)
        writer.add_bool("test.bool", True)
        writer.add_string("test.string", "é\0🎉")
        writer.add_custom_alignment(64)

    path = write(tmp_path / "m.gguf", kind="Q4_1", metadata=metadata)
    reader = gguf.GGUFReader(path)
    fields, listed = read_header(path)
    package = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert fields.pop("test.nested") == [[1, 2], [3]]
    del package["test.nested"]  # which the package flattens
    assert fields == package
    assert [(t.name, t.shape, t.type, t.offset) for t in listed] == [
        (t.name, tuple(int(n) for n in t.shape), int(t.tensor_type), int(t.data_offset)) for t in reader.tensors
    ]


def test_truncated_files(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    size = path.stat().st_size
    os.truncate(path, size - 100)
    with pytest.raises(SourceProblems) as caught:
        convert(path, tmp_path / "out")
    assert caught.value.problems == (
        f"m.gguf is truncated: blk.1.ffn_down.weight ends at byte {size}, the file has {size - 100}",
    )
    for shorter in (1500, 30, 10, 0):
        os.truncate(path, shorter)
        with pytest.raises(ConversionError) as refused:
            convert(path, tmp_path / "out")
        assert str(refused.value) == f"{path} is not a readable GGUF file: the file ends inside its header"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"<!DOCTYPE html>" * 100, "it begins with b'<!DO', not b'GGUF'"),
        (
            b"GGUF" + (1).to_bytes(4, "little") + bytes(99),
            "its version is 1; 2 and 3 are supported, in little-endian order",
        ),
        (
            b"GGUF" + (3).to_bytes(4, "big") + bytes(99),
            "its version is 50331648; 2 and 3 are supported, in little-endian order",
        ),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 2**60, 1), "the file ends inside its header"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "a metadata value has the unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"\xff", 4) + bytes(4), "'utf-8' codec can't decode byte 0xff"),
    ],
    ids=["html", "old", "big endian", "count", "type", "utf-8"],
)
def test_foreign_and_corrupt_headers(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ConversionError) as caught:
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert str(caught.value).startswith(f"{tmp_path / 'm.gguf'} is not a readable GGUF file: {sentence}")
