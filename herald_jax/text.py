"""Text in, text out: a checkpoint's tokenizer, its chat template, and detokenisation of a growing answer.

Only `tokenizers` and `jinja2` are needed; the results equal transformers' (tests/herald_jax/test_text_oracle.py). The
chat template is the checkpoint's own. There is no list of templates by model name: a name says nothing certain about
the format a checkpoint was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, models, normalizers, pre_tokenizers

from herald_jax.errors import CheckpointError, GenerationError

# The tokens a chat template may name as variables.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Checkpoints of this class may come without a tokenizer.json; its word boundaries are then this published expression.
_QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Made by `load_tokenizer`.

    Attributes:
      named_tokens: the special tokens that have a role, such as {"eos_token": "<|im_end|>"}.
      chat_template: Jinja source, or None when the checkpoint has none.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, named_tokens: Mapping[str, str], chat_template: str | None
    ) -> None:
        self._backend = backend
        self.named_tokens = dict(named_tokens)
        self.chat_template = chat_template
        self._template: jinja2.Template | None = None

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows; a model's embedding often has more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def token_to_id(self, token: str) -> int | None:
        """The id of one token, or None if it is not in the table."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, never truncated or padded.

        Special tokens written out in the text become their ids, as they must for a rendered chat template. A literal
        mask token is among them, and stays prompt data: the block loop knows holes by position, never by id.

        Args:
          text: any string.
          add_special_tokens: also put the tokens around it that the tokenizer's post-processor asks for (Llama's
            beginning-of-text). A rendered chat template already holds them.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids outside the table vanish.

        Args:
          ids: token ids.
          skip_special: leave out special tokens.
        """
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render a conversation with the checkpoint's own template.

        Args:
          messages: [{"role": "system" | "user" | "assistant", "content": str}, ...], oldest first.
          add_generation_prompt: end with the header of the assistant's turn.
          **variables: further variables of the template, such as `enable_thinking=False` or `tools=[...]`.

        Returns:
          The prompt as text; encode it with `add_special_tokens=False`, or use `encode_chat`.

        Raises:
          CheckpointError: the checkpoint has no chat template, or the template does not compile.
          GenerationError: the template refuses these messages (two user turns in a row, an unknown role, ...).
        """
        if self._template is None:
            if self.chat_template is None:
                raise CheckpointError(
                    "the checkpoint has no chat template; give the prompt as it is (--no-chat), or put the model's own "
                    "chat_template.jinja beside its tokenizer.json before converting"
                )
            try:
                self._template = _environment().from_string(self.chat_template)
            except jinja2.TemplateSyntaxError as error:
                raise CheckpointError(f"the checkpoint's chat template is broken: {error}") from error
        # An absent key and a key that is None mean the same to a caller, but templates test for the absent one.
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        settings = {"tools": None, "documents": None, **self.named_tokens, **variables}
        try:
            return self._template.render(messages=plain, add_generation_prompt=add_generation_prompt, **settings)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise GenerationError(f"the checkpoint's chat template refuses these messages: {error}") from error

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of `chat(...)`."""
        text = self.chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)


class StreamDecoder:
    """Turns ids that arrive a few at a time into text that arrives a few characters at a time.

    The pieces joined, `flush` included, are the text that `decode` gives for all ids at once. A character whose bytes
    are still incomplete is held back until they are there.

    Each call decodes the new ids behind the ones before them, since some decoders treat the first token in a special
    way (SentencePiece drops its leading space); the ids kept for that are only those of the last call or two.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._context: list[int] = []  # ids whose text is out, kept so that the next ones are not first
        self._pending: list[int] = []  # ids after them, of whose text some may be out
        self._sent = 0  # characters of decode(context + pending) that are out

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; "" if there is none yet."""
        self._pending.extend(int(i) for i in ids)
        text = self._decode(self._context + self._pending)
        # The bytes of an unfinished character show as U+FFFD at the end. What is really invalid shows alike, and goes
        # out once something follows it.
        settled = text.rstrip(_REPLACEMENT)
        piece = settled[self._sent :]
        self._sent = max(self._sent, len(settled))
        if len(settled) == len(text):
            self._advance()
        return piece

    def flush(self) -> str:
        """What is held back, at the end of the answer; the decoder is as new afterwards."""
        piece = self._decode(self._context + self._pending)[self._sent :]
        self._context, self._pending, self._sent = [], [], 0
        return piece

    def _advance(self) -> None:
        """Make the pending ids the next context, if alone they have text and so are not first themselves."""
        text = self._decode(self._pending)
        if text:
            self._context, self._pending, self._sent = self._pending, [], len(text)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Load a tokenizer from the files Hugging Face checkpoints carry.

    Read are tokenizer.json (or, for Qwen2's tokenizer class, vocab.json and merges.txt), tokenizer_config.json,
    special_tokens_map.json, added_tokens.json and chat_template.jinja. Tokens that only the configuration lists, like
    SDAR's mask token, are added at the ids it gives them.

    Raises:
      CheckpointError: a file is missing, unreadable or contradicts another.
    """
    directory = Path(directory)
    config = _read_json(directory / "tokenizer_config.json") or {}
    named = _named_tokens(config, _read_json(directory / "special_tokens_map.json") or {})
    backend = _load_backend(directory, config)
    # A prompt is never cut or filled up, whatever the tokenizer was saved with after training.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    _add_listed_tokens(backend, config, _read_json(directory / "added_tokens.json") or {}, set(named.values()))
    return Tokenizer(backend, named_tokens=named, chat_template=_chat_template(directory, config))


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, but an object was expected")
    return value


def _load_backend(directory: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            # Not from_file: that raises plain Exception for whatever it cannot parse, this a ValueError.
            return tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    if vocab.is_file() and merges.is_file() and config.get("tokenizer_class") in _QWEN2_CLASSES:
        return _qwen2_backend(vocab, merges)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    raise CheckpointError(
        f"{directory} has no tokenizer.json; save the model's fast tokenizer there "
        "(transformers' AutoTokenizer writes it with save_pretrained)"
    )


def _qwen2_backend(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    """Qwen2's byte-level BPE from its two text files."""
    table = _read_json(vocab) or {}
    if not all(isinstance(index, int) for index in table.values()):
        raise CheckpointError(f"{vocab} maps a token to something that is not an id")
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(merges.read_text(encoding="utf-8").split("\n"), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= table.keys():
            raise CheckpointError(f"line {number} of {merges} merges {line!r}, which {vocab.name} does not hold")
        pairs.append((left, right))
    backend = tokenizers.Tokenizer(models.BPE(table, pairs))
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(tokenizers.Regex(_QWEN2_WORDS), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _content(token: Any) -> str | None:
    """A token is written as a string, or as an object with its string under "content"."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _named_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        for source in sources:  # the later file wins, as it does for transformers
            token = _content(source.get(name))
            if token is not None:
                named[name] = token
    return named


def _add_listed_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], added: dict[str, Any], named: set[str]
) -> None:
    """Add the tokens that only tokenizer_config.json or added_tokens.json lists, and check the ids of all."""
    listed: dict[int, tokenizers.AddedToken] = {}
    for text, index in added.items():
        listed[int(index)] = tokenizers.AddedToken(text, special=text in named, normalized=text not in named)
    for index, token in (config.get("added_tokens_decoder") or {}).items():
        content = _content(token)
        if content is None or not isinstance(token, dict):
            raise CheckpointError(f"added_tokens_decoder in tokenizer_config.json gives id {index} no content")
        flags = {name: bool(token.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        listed[int(index)] = tokenizers.AddedToken(content, **flags)
    for index, token in sorted(listed.items()):
        found = backend.token_to_id(token.content)
        if found is None:
            # The library gives a new token the next free id, so a gap in the list would shift what follows.
            backend.add_tokens([token])
            found = backend.token_to_id(token.content)
        if found != index:
            raise CheckpointError(
                f"the tokenizer's configuration gives {token.content!r} the id {index}, but its table gives it {found}"
            )


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja if there is one, else tokenizer_config.json's (of several named ones, "default")."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8 text: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    if template is None or isinstance(template, str):
        return template
    raise CheckpointError("chat_template in tokenizer_config.json is neither a string nor a list of named templates")


class _Generation(jinja2.ext.Extension):
    """The tag some templates put around the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment chat templates are written for. Templates come from outside, hence the sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own filter escapes HTML, which no model was trained on.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
