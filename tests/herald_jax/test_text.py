"""text.py: ids, templates and streamed text equal transformers' (landed values), and what is wrong gets a sentence."""

import json
import random
import shutil
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from convert.hf import open_source
from herald_jax.errors import CheckpointError, GenerationError
from herald_jax.text import StreamDecoder, Tokenizer, load_tokenizer
from tests.data_packages import qwen3_tokenizer, smollm2_gguf
from tests.herald_jax import text_oracle
from tests.tiny import byte_level

ORACLE = json.loads(text_oracle.PATH.read_text(encoding="utf-8"))
LANDED = ORACLE["qwen3"]
SIMPLE_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def qwen3() -> Tokenizer:
    return load_tokenizer(qwen3_tokenizer())


def sentencepiece_like() -> tokenizers.Tokenizer:
    """A table of the Llama 2 kind: "▁" for a space, a leading space that decoding strips, bytes as a fallback."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"▁Helo,wrdcafé🦊"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = []
    for word in ("▁Hello", "▁world", "▁caf"):
        for end in range(2, len(word) + 1):
            vocab.setdefault(word[:end], len(vocab))
            merges.append((word[: end - 1], word[end - 1]))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def save(directory: Path, backend: tokenizers.Tokenizer, **config: object) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def wrap(backend: tokenizers.Tokenizer, template: str | None = None, **named: str) -> Tokenizer:
    return Tokenizer(backend, named_tokens=named, chat_template=template)


# --- real files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(len(text_oracle.TEXTS)), ids=lambda i: ascii(text_oracle.TEXTS[i])[:24])
def test_encode_and_decode_equal_transformers(qwen3: Tokenizer, index: int) -> None:
    ids = qwen3.encode(text_oracle.TEXTS[index])
    assert ids == LANDED["ids"][index]
    assert qwen3.decode(ids) == LANDED["decoded"][index]
    assert qwen3.decode(ids, skip_special=False) == LANDED["decoded_with_special"][index]


@pytest.mark.parametrize("name", text_oracle.CONVERSATIONS)
def test_chat_equals_transformers(qwen3: Tokenizer, name: str) -> None:
    messages, arguments = text_oracle.CONVERSATIONS[name]
    assert qwen3.chat(messages, **arguments) == LANDED["chats"][name]
    assert qwen3.encode_chat(messages, **arguments) == LANDED["chat_ids"][name]


def test_smollm2_from_gguf_equals_transformers() -> None:
    source = open_source(smollm2_gguf())
    try:
        tokenizer = load_tokenizer(source.config_dir)
    finally:
        source.close()
    landed = ORACLE["smollm2"]
    assert [tokenizer.encode(text) for text in text_oracle.TEXTS] == landed["ids"]
    assert [tokenizer.decode(ids) for ids in landed["ids"]] == landed["decoded"]
    for name, (messages, arguments) in text_oracle.CONVERSATIONS.items():
        assert tokenizer.chat(messages, **arguments) == landed["chats"][name]
        assert tokenizer.encode_chat(messages, **arguments) == landed["chat_ids"][name]
    for ids in landed["ids"]:
        check_stream(tokenizer, ids, 1)


def test_qwen2_class_without_tokenizer_json_gives_the_same_ids(tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(qwen3_tokenizer() / name, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.encode(text) for text in text_oracle.TEXTS] == LANDED["ids"]
    assert [tokenizer.decode(ids) for ids in LANDED["ids"]] == LANDED["decoded"]


def test_named_tokens_and_sizes(qwen3: Tokenizer) -> None:
    assert qwen3.named_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert qwen3.vocab_size == 151669
    assert qwen3.token_to_id("<|im_end|>") == 151645
    assert qwen3.token_to_id("<|MASK|>") is None


@pytest.mark.parametrize("width", [1, 3, 8, 32])
@pytest.mark.parametrize("index", range(len(text_oracle.TEXTS)), ids=lambda i: ascii(text_oracle.TEXTS[i])[:24])
def test_stream_of_real_tokens(qwen3: Tokenizer, index: int, width: int) -> None:
    check_stream(qwen3, LANDED["ids"][index], width)


# --- streaming ----------------------------------------------------------------------------------------------------


def check_stream(tokenizer: Tokenizer, ids: list[int], width: int, *, prompt: bool = True) -> None:
    """What is out is always a start of the whole text (with `prompt`, every complete character of what was pushed)."""
    stream = StreamDecoder(tokenizer)
    text, whole = "", tokenizer.decode(ids)
    for start in range(0, len(ids), width):
        text += stream.push(ids[start : start + width])
        assert whole.startswith(text)
        if prompt:
            assert text == tokenizer.decode(ids[: start + width]).rstrip("\ufffd")
    assert text + stream.flush() == whole


WORDS = ["Hello", " world", "é", "🦊", " ", "  ", "👩‍👧", "\n", "cafe\u0301", "한", ","]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("backend", [byte_level, sentencepiece_like], ids=["byte_level", "sentencepiece_like"])
def test_stream_splits_anywhere(backend, seed: int) -> None:
    tokenizer = wrap(backend())
    draw = random.Random(seed)
    ids = tokenizer.encode("".join(draw.choice(WORDS) for _ in range(30)))
    for width in (1, 2, 5, 32):
        # The byte fallback shows a run of bytes as invalid, complete characters too, until its last one is complete.
        check_stream(tokenizer, ids, width, prompt=backend is byte_level)


@pytest.mark.parametrize("backend", [byte_level, sentencepiece_like], ids=["byte_level", "sentencepiece_like"])
def test_stream_with_special_tokens_in_between(backend) -> None:
    tokenizer = wrap(backend())
    special = max(tokenizer.token_to_id(t) or 0 for t in ("<s>", "<|im_end|>"))
    ids = [special, *tokenizer.encode("Hello"), special, special, *tokenizer.encode(" world"), special]
    for width in (1, 2, 3):
        check_stream(tokenizer, ids, width)


def test_stream_keeps_the_space_that_decoding_a_first_token_drops() -> None:
    tokenizer = wrap(sentencepiece_like())
    hello, world = tokenizer.encode("Hello world")
    stream = StreamDecoder(tokenizer)
    assert [stream.push([hello]), stream.push([world]), stream.flush()] == ["Hello", " world", ""]


def test_stream_holds_back_an_unfinished_character_only() -> None:
    tokenizer = wrap(byte_level())
    ids = tokenizer.encode("ok 🦊!")
    stream = StreamDecoder(tokenizer)
    assert stream.push(ids[:5]) == "ok "
    assert stream.push(ids[5:6]) == ""
    assert stream.push(ids[6:]) == "🦊!"


def test_stream_gives_bytes_that_never_become_a_character_as_replacement() -> None:
    tokenizer = wrap(byte_level())
    fox = tokenizer.encode("🦊")
    stream = StreamDecoder(tokenizer)
    assert stream.push(fox[:2]) == ""
    assert stream.push(tokenizer.encode("a")) == "\ufffda"
    assert stream.push(fox[:3]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(fox) == "🦊", "a flushed decoder starts afresh"


def test_long_stream_decodes_a_bounded_window(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = wrap(byte_level())
    widths = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **kw: (widths.append(len(ids)), decode(ids, **kw))[1])
    stream = StreamDecoder(tokenizer)
    for token in tokenizer.encode("A longer text, é 🦊. " * 40):
        stream.push([token])
    assert max(widths) <= 8


# --- loading ------------------------------------------------------------------------------------------------------


def test_tokens_that_only_the_configuration_lists_are_added(tmp_path: Path) -> None:
    backend = byte_level()
    first = backend.get_vocab_size()
    listed = {
        str(first): {"content": "<think>", "special": False},
        str(first + 1): {"content": "<|M|>", "special": True},
    }
    tokenizer = load_tokenizer(save(tmp_path, backend, added_tokens_decoder=listed, mask_token="<|M|>"))
    assert tokenizer.encode("a<|M|><think>") == [*tokenizer.encode("a"), first + 1, first]
    assert tokenizer.decode([first, first + 1]) == "<think>"
    assert tokenizer.named_tokens["mask_token"] == "<|M|>"


def test_added_tokens_json_is_read_and_special_tokens_map_wins(tmp_path: Path) -> None:
    backend = byte_level()
    first = backend.get_vocab_size()
    save(tmp_path, backend, eos_token="<|endoftext|>")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|M|>": first}))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>", "lstrip": False}, "mask_token": "<|M|>"})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.named_tokens == {"eos_token": "<|im_end|>", "mask_token": "<|M|>"}
    assert tokenizer.decode([first]) == ""


def test_padding_and_truncation_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = load_tokenizer(save(tmp_path, backend))
    assert len(tokenizer.encode("abcdefgh")) == 8


def test_template_file_wins_over_configuration(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), chat_template="old", eos_token="<|im_end|>")
    (tmp_path / "chat_template.jinja").write_text(SIMPLE_TEMPLATE, encoding="utf-8")
    assert load_tokenizer(tmp_path).chat([{"role": "user", "content": "x"}]) == "[user]x<|im_end|>"


def test_default_of_several_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert load_tokenizer(save(tmp_path, byte_level(), chat_template=named)).chat([]) == "plain"


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "has no tokenizer.json"),
        ({"tokenizer.json": "{"}, "cannot be read as a tokenizer"),
        ({"tokenizer.json": "{}"}, "cannot be read as a tokenizer"),
        ({"tokenizer_config.json": "[1]"}, "holds a JSON list"),
        ({"tokenizer_config.json": "{"}, "not valid JSON"),
        ({"vocab.json": "{}", "merges.txt": ""}, "has no tokenizer.json"),
        (
            {"tokenizer_config.json": '{"tokenizer_class": "Qwen2Tokenizer"}', "vocab.json": "{}", "merges.txt": "a b"},
            "line 1 of .* merges 'a b'",
        ),
    ],
    ids=["empty", "broken", "not_a_tokenizer", "list", "broken_config", "unknown_class", "merge_outside_vocab"],
)
def test_unreadable_files_get_one_sentence(tmp_path: Path, files: dict[str, str], sentence: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=sentence):
        load_tokenizer(tmp_path)


def test_missing_directory_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        load_tokenizer(tmp_path / "absent")


def test_listed_id_that_contradicts_the_table(tmp_path: Path) -> None:
    listed = {"7": {"content": "<|im_end|>", "special": True}}
    with pytest.raises(CheckpointError, match=r"gives '<\|im_end\|>' the id 7, but its table gives it 258"):
        load_tokenizer(save(tmp_path, byte_level(), added_tokens_decoder=listed))


# --- templates ----------------------------------------------------------------------------------------------------


def test_no_template_is_a_sentence_and_no_guess() -> None:
    with pytest.raises(CheckpointError, match="no chat template; give the prompt as it is"):
        wrap(byte_level()).chat([{"role": "user", "content": "x"}])


def test_template_features() -> None:
    template = (
        "{%- for m in messages %}\n    {%- if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n{%- endfor %}"
        "{{ bos_token }}{{ strftime_now('%%') }}{% if add_generation_prompt %}>{% endif %}"
    )
    messages = [{"role": "skip"}, {"role": "user", "content": "<é>", "name": None}]
    assert wrap(byte_level(), template).chat(messages) == '{"role": "user", "content": "<é>"}%>'
    assert wrap(byte_level(), template, bos_token="<s>").chat([], add_generation_prompt=False) == "<s>%"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 'x' }}", "no attribute 'content'"),
        ("{{ 'x' + messages[0].number }}", "can only concatenate str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ],
    ids=["raise_exception", "missing_key", "type", "sandbox", "immutable"],
)
def test_template_that_refuses(template: str, sentence: str) -> None:
    with pytest.raises(GenerationError, match=sentence):
        wrap(byte_level(), template).chat([{"role": "user", "number": 1}])


def test_broken_template() -> None:
    with pytest.raises(CheckpointError, match="chat template is broken"):
        wrap(byte_level(), "{% for %}").chat([])


def test_special_tokens_around_plain_text_but_not_around_a_template() -> None:
    backend = byte_level()
    start = backend.token_to_id("<|im_start|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    tokenizer = wrap(backend, "<|im_start|>{{ messages[0].content }}")
    assert tokenizer.encode("a") == tokenizer.encode_chat([{"role": "user", "content": "a"}])
    assert tokenizer.encode("a")[0] == start
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[1:]
