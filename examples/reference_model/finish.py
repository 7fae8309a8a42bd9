"""From a training run's output to the shipped directory: `python -m examples.reference_model.finish RUN DIRECTORY`.

Joins the pieces and writes the model card beside the weights, with the training log's last figures and, if
`--results` names a results file of `benchmarks.accuracy`, the scores. `herald_jax/reference` is where the package looks
for it:

    python -m examples.reference_model.finish RUN herald_jax/reference --results benchmarks/results/accuracy-h200.json
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

from benchmarks.accuracy_tables import scores
from examples.reference_model import export
from examples.reference_model.corpus import PACKAGES

MOST_BYTES = 32 << 20

_CARD = """---
license: apache-2.0
language: en
---
# herald-jax reference model

A block-diffusion language model of {parameters:.1f} M parameters in SDAR's form: {layers} layers, hidden size
{hidden}, {heads} query and {kv_heads} KV heads of {head_dim}, block length {block}, tied embeddings, {vocab} tokens. It
was made to find things in contexts of up to 8K tokens, so that sparse attention can be measured on a model that really
retrieves. It is not a chat model, knows next to nothing, and writes poor prose.

## Prompts

`Read the text and answer the question at its end.`, then the text, then `Question: ... Answer:`, as
`herald_jax/tasks.py` makes them.

## Data and licence

{sources}

Some books of the World English Bible were held out and are the haystack of the evaluation. Into this text the synthetic
tasks of `herald_jax/tasks.py` were put, with other seeds than the evaluation's. The weights are licensed under
Apache-2.0.

## Recipe

`examples/reference_model` (docs/training.md has the commands): `corpus`, `train` twice on one H200, about eight minutes
each, `finish`. Training ended with {training}.

## Use

```
herald-convert herald_jax/reference reference.ckpt
herald-generate reference.ckpt --file questions.txt --max-new-tokens 32
```

`make demo` does the same with three questions.

## Scores

{scores}
"""


def card(config: dict[str, Any], parameters: int, training: dict[str, Any], results: dict[str, Any] | None) -> str:
    """The model card's text."""
    sources = "\n".join(f"- {package} ({licence})" for package, licence in PACKAGES.items())
    figures = f"{training.get('tokens', 0) / 1e6:.0f} M tokens in its last run, {training.get('steps', 0)} steps"
    return _CARD.format(
        parameters=parameters / 1e6, layers=config["num_hidden_layers"], hidden=config["hidden_size"],
        heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"], head_dim=config["head_dim"],
        block=config["block_size"], vocab=config["vocab_size"], sources=sources, training=figures,
        scores="Not evaluated yet." if results is None else scores(results),
    )  # fmt: skip


def finish(run: Path, directory: Path, results: Path | None = None) -> None:
    """Write `directory` from a run's output. Raises SystemExit if it is larger than what the package may carry."""
    from safetensors import safe_open

    joined = export.join_pieces(run, directory.parent)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    training: dict[str, Any] = next((r["finished"] for r in reversed(log) if "finished" in r), {})
    found = None if results is None else json.loads(results.read_text(encoding="utf-8"))
    with safe_open(joined / "model.safetensors", framework="np") as tensors:
        parameters = sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    config = json.loads((joined / "config.json").read_text(encoding="utf-8"))
    (joined / "README.md").write_text(card(config, parameters, training, found), encoding="utf-8")
    (joined / "training.json").unlink(missing_ok=True)
    for path in joined.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner reads
    size = sum(path.stat().st_size for path in joined.iterdir())
    if size > MOST_BYTES:
        raise SystemExit(f"error: {joined} has {size} bytes, more than the {MOST_BYTES} that the package may carry")
    if joined != directory:
        if directory.exists():
            shutil.rmtree(directory)
        joined.rename(directory)
    print(f"{directory}: {size / 1e6:.1f} MB, {parameters / 1e6:.2f} M parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, help="output of examples.reference_model.train")
    parser.add_argument("directory", type=Path, help="the Hugging Face directory to write")
    parser.add_argument("--results", type=Path, help="results file of benchmarks.accuracy, for the model card")
    args = parser.parse_args()
    finish(args.run, args.directory, args.results)


if __name__ == "__main__":
    main()
