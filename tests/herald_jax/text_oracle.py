"""Landed tokenizer and chat template values: transformers' own, on real tokenizer files.

    python -m tests.herald_jax.text_oracle        rewrites data/text_oracle.json (needs transformers)

test_text.py compares herald_jax with the file, test_text_oracle.py the file with transformers.
"""

import json
from pathlib import Path
from typing import Any

from tests.data_packages import qwen3_tokenizer, smollm2_gguf

PATH = Path(__file__).parent / "data" / "text_oracle.json"

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two leading spaces and a trailing one ",
    "line one\nline two\r\n\r\n\tindented",
    "def f(x):\n    return x[1:-1] + 3.14159e-10\n",
    "1234567890 and 3½",
    "I'll say it's they've I'D",
    "The quick brown 🦊 jumps over 13 lazy 🐶🐶s 👩‍👩‍👧‍👦🏳️‍🌈",
    "Zoë's naïve café, decomposed: e\u0301 \u1e9b\u0323",
    "今天天气很好，我们去公园散步吧。한국어도 조금. العربية قليلاً",
    "literal <|im_start|>user and <|im_end|> and <|MASK|> and <tool_response>",
    "\u00a0\u200bzero width\u2028separator\ufeff",
    "\ufffd replacement \U0010ffff",
]

# id → (messages, further arguments of the template)
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([{"role": "user", "content": "What is 2 + 2?"}], {}),
    "system": ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>&'\"</b>"}], {}),
    "turns": (
        [
            {"role": "user", "content": "Name a colour."},
            {"role": "assistant", "content": "Blue 💙."},
            {"role": "user", "content": "  Another\n"},
        ],
        {},
    ),
    "no_prompt": (
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}],
        {"add_generation_prompt": False},
    ),
    "no_thinking": ([{"role": "user", "content": "Hi"}], {"enable_thinking": False}),
    "tools": (
        [
            {"role": "user", "content": "Weather in Zürich?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Zürich", "<&>": 1}}}],
            },
            {"role": "tool", "content": '{"celsius": 21}'},
        ],
        {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}]},
    ),
}


def compute_all() -> dict[str, Any]:
    """The landed values: Qwen3's files, and SmolLM2's tokenizer as transformers reads it out of GGUF."""
    gguf = smollm2_gguf()
    return {"qwen3": compute(qwen3_tokenizer()), "smollm2": compute(gguf.parent, gguf_file=gguf.name)}


def compute(directory: Path, **arguments: str) -> dict[str, Any]:
    """What transformers makes of TEXTS and CONVERSATIONS with the tokenizer files in `directory`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, **arguments)
    ids = [tokenizer.encode(text) for text in TEXTS]
    return {
        "ids": ids,
        "decoded": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
        "decoded_with_special": [tokenizer.decode(row, skip_special_tokens=False) for row in ids],
        "chats": {
            name: tokenizer.apply_chat_template(
                messages, tokenize=False, **{"add_generation_prompt": True, **arguments}
            )
            for name, (messages, arguments) in CONVERSATIONS.items()
        },
        "chat_ids": {
            name: tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=False, **{"add_generation_prompt": True, **arguments}
            )
            for name, (messages, arguments) in CONVERSATIONS.items()
        },
    }


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(json.dumps(compute_all(), indent=1, ensure_ascii=True) + "\n", encoding="utf-8")
