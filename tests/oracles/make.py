"""Record the oracle values of `tests/oracles`: `python -m tests.oracles.make [PART ...]`.

The parts are checkpoints, logits, decodes, training and smollm2.

Writes, under tests/oracles/data (everything, unless parts are named):

* `<checkpoint>/`        the tiny checkpoints of `zoo`, as Hugging Face directories
* `logits.npz`           `<checkpoint>/<block length>`: f32[N, V] of one pass; block length 1 is a plain causal pass
* `decodes.json`         `cases.CASES` and the greedy continuations of the causal LMs, with the decisions' margins
* `training.npz`         see `training`
* `smollm2.json`, `smollm2_logits.npz`   see `smollm2`

Needs torch and transformers (the `oracle` extra). `test_live.py` computes the same values again and compares.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import sys
from collections import Counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tests.oracles import cases, smollm2, training, zoo
from tests.oracles.samplers import Decode, Margins, fast_dllm_v2, full_logits, sdar

ATTEMPTS = 400


def decode(model: PreTrainedModel, case: cases.Case, prompt: list[int], stops: list[int]) -> Decode:
    """One row of a case by its family's sampler."""
    arguments: dict[str, Any] = {
        "mask_id": cases.MASK,
        "block_length": case.block_length,
        "policy": case.policy,
        "max_new_tokens": case.max_new_tokens,
        "stop_ids": stops,
    }
    if zoo.ZOO[case.model].family == "sdar":
        return sdar(model, prompt, **arguments)
    small, cache = case.small_block_length, case.block_cache
    return fast_dllm_v2(model, prompt, small_block_length=small, block_cache=cache, **arguments)


def causal_continuation(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
    """`new_tokens` greedy tokens by transformers' generate(), and the least distance between best and second logit."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()
    best = torch.topk(full_logits(model, out, 1)[len(prompt) - 1 : -1], 2).values
    return out[len(prompt) :], float((best[:, 0] - best[:, 1]).min())


def _row(model: PreTrainedModel, case: cases.Case, row: int, length: int, stops: list[int]) -> dict[str, Any]:
    """The first candidate prompt of a row whose decode is decided by more than `cases.MARGIN` throughout."""
    for prompt in itertools.islice(cases.prompts(case, length, row), ATTEMPTS):
        result = decode(model, case, prompt, stops)
        # A mask predicted as a token could not be told from a hole in the published samplers: not comparable.
        if min(result.margins.token, result.margins.reveal) > cases.MARGIN and cases.MASK not in result.written:
            return {"prompt": prompt, "tokens": result.tokens, "passes": result.passes, "margins": result.margins}
    raise RuntimeError(f"{case.name}: no prompt of length {length} is decided clearly in {ATTEMPTS} attempts")


def record_case(model: PreTrainedModel, case: cases.Case) -> dict[str, Any]:
    """All rows of a case. With stops, the stop tokens are picked from what the rows say without any."""
    stops: list[int] = []
    if case.stops:
        free = [decode(model, case, next(cases.prompts(case, n, row)), []) for row, n in enumerate(case.lengths)]
        counts = Counter(token for result in free for token in set(result.tokens[2:]))
        # Neither the commonest (every row would end at once) nor the rarest.
        stops = [token for token, _ in counts.most_common(3 + case.stops)[3:]]
    rows = [_row(model, case, row, length, stops) for row, length in enumerate(case.lengths)]
    narrowest = Margins(min(row["margins"].token for row in rows), min(row.pop("margins").reveal for row in rows))
    return {"stops": stops, "rows": rows, "margins": {k: min(v, 1e9) for k, v in dataclasses.asdict(narrowest).items()}}


def record_decodes() -> dict[str, Any]:
    """The content of decodes.json."""
    models = {name: zoo.load(name) for name in {case.model for case in cases.CASES} | set(cases.CAUSAL)}
    recorded: dict[str, Any] = {"cases": {}, "causal": {}}
    for case in cases.CASES:
        recorded["cases"][case.name] = record_case(models[case.model], case)
        rows = recorded["cases"][case.name]["rows"]
        said = {token for row in rows for token in row["tokens"]}
        steps = sum(row["passes"] for row in rows) / sum(len(row["tokens"]) for row in rows)
        narrow = recorded["cases"][case.name]["margins"]
        print(f"{case.name}: {len(said)} distinct tokens, {steps:.2f} passes a token, margins {narrow}", flush=True)
    for name in cases.CAUSAL:
        generator = np.random.default_rng([ord(letter) for letter in name])
        rows = []
        for length in cases.CAUSAL_LENGTHS:
            margin = 0.0
            while margin < cases.MARGIN:
                prompt = generator.integers(0, 256, length).tolist()
                tokens, margin = causal_continuation(models[name], prompt, cases.CAUSAL_NEW_TOKENS)
            rows.append({"prompt": prompt, "tokens": tokens})
        recorded["causal"][name] = rows
    return recorded


def record_logits() -> dict[str, np.ndarray]:
    """The content of logits.npz."""
    recorded = {}
    for name in zoo.ZOO:
        model = zoo.load(name)
        for block_length in cases.LOGITS_BLOCKS.get(name, (1,)):
            recorded[f"{name}/{block_length}"] = full_logits(model, cases.logits_ids(name), block_length).numpy()
    return recorded


def dump(value: Any, path: pathlib.Path) -> None:
    """JSON with one decoded row a line, so that the change of a row is one line of a diff."""
    path.write_text(_lines(value, 0) + "\n")


def _lines(value: Any, indent: int) -> str:
    pad = "\n" + " " * (indent + 1)
    end = "\n" + " " * indent
    if isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values()):
        return (
            "{"
            + pad
            + ("," + pad).join(f"{json.dumps(k)}: {_lines(v, indent + 1)}" for k, v in value.items())
            + end
            + "}"
        )
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + pad + ("," + pad).join(json.dumps(item, separators=(",", ":")) for item in value) + end + "]"
    return json.dumps(value)


def main(parts: list[str]) -> None:
    """Record the named parts, or all."""
    torch.set_num_threads(1)
    zoo.DATA.mkdir(exist_ok=True)
    known = ("checkpoints", "logits", "decodes", "training", "smollm2")
    if unknown := set(parts) - set(known):
        raise SystemExit(f"unknown part {sorted(unknown)}: choose from {', '.join(known)}")
    chosen = parts or list(known)
    if "checkpoints" in chosen:
        for name, spec in zoo.ZOO.items():
            zoo.write(name, zoo.build(spec))
    if "logits" in chosen:
        np.savez_compressed(zoo.DATA / "logits.npz", **record_logits())
    if "decodes" in chosen:
        dump(record_decodes(), zoo.DATA / "decodes.json")
    if "training" in chosen:
        np.savez_compressed(zoo.DATA / "training.npz", **training.record())
    if "smollm2" in chosen:
        values, logits = smollm2.record()
        dump(values, zoo.DATA / "smollm2.json")
        np.savez_compressed(zoo.DATA / "smollm2_logits.npz", **logits)


if __name__ == "__main__":
    main(sys.argv[1:])
