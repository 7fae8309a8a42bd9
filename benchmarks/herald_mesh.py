"""`python -m benchmarks.herald_mesh`: HERALD over two devices of one host, beside one device.

The whole path through `generate`, prefill included: random weights in a real shape, bfloat16, random prompts, blocks of
32 in fixed steps. Each device keeps its own KV heads in host memory of its own, chooses, fetches and appends them.
Writes the row `mesh<devices>/throughput`: new tokens per second of decoding on the mesh, and what one device does with
the same request. Sums over two devices round differently, so in bfloat16 tokens of random weights part at near ties;
the row says how many were equal, and how many in float32, where a small model of the same form is run first.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import numpy as np

from benchmarks import common
from benchmarks.shapes import SHAPES
from herald_jax import GenerateConfig, GenerateResult, Herald, Model, ModelConfig, StaticLowConfidence, generate
from herald_jax.host_kv import host_sharding
from herald_jax.model import init_params
from herald_jax.sharding import make_mesh


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="sdar8b")
    parser.add_argument("--context", type=int, default=16 * 1024, help="tokens of each prompt (default %(default)s)")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=6, help="blocks that each row writes (default %(default)s)")
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument("--devices", type=int, default=2)
    common.output_option(parser)
    return parser.parse_args()


def run(
    config: ModelConfig, prompts: list[list[int]], request: GenerateConfig, plan: Herald, devices: int, repeats: int
) -> tuple[GenerateResult, GenerateResult]:
    """What one device and what `devices` of them generate; the last of `repeats` runs of each."""
    found = []
    for mesh in (None, make_mesh(model=devices)):
        model = Model.from_params(config, init_params(config, jax.random.key(0)), mesh=mesh)
        for _ in range(repeats):  # the first compiles, and page-locks host memory for the first time
            result = generate(model, prompts, request, plan)
        found.append(result)
        del model
        print(
            f"{config.dtype}, {1 if mesh is None else devices} devices", *result.stats.lines(), "", sep="\n", flush=True
        )
    return found[0], found[1]


def equal(one: GenerateResult, many: GenerateResult, first: int | None = None) -> float:
    """Share of tokens that are the same, of each row's `first` ones."""
    pairs = zip(one.tokens, many.tokens, strict=True)
    return float(np.mean([np.mean(np.asarray(a)[:first] == np.asarray(b)[:first]) for a, b in pairs]))


def equal_in_float32(config: ModelConfig, devices: int) -> float:
    """Share of equal tokens of a small model of the same form, in float32 throughout."""
    small = dataclasses.replace(
        config, num_layers=2, hidden_size=512, intermediate_size=512, vocab_size=1024, dtype="float32",
        max_position_embeddings=4096,
        diffusion=dataclasses.replace(config.diffusion, mask_token_id=1023, stop_token_ids=(1022,)),
    )  # fmt: skip
    block, rng = small.diffusion.block_length, np.random.default_rng(1)
    request = GenerateConfig(max_new_tokens=4 * block, policy=StaticLowConfidence(block), ignore_stop=True)
    prompts = [rng.integers(0, 1000, length).tolist() for length in (700, 1030)]
    with jax.default_matmul_precision("highest"):
        return equal(*run(small, prompts, request, Herald(0.1, min_budget=16), devices, 1))


def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    config = SHAPES[options.shape]
    block = config.diffusion.block_length
    request = GenerateConfig(
        max_new_tokens=options.blocks * block, policy=StaticLowConfidence(block), ignore_stop=True, prefill_chunk=4096
    )
    rng = np.random.default_rng(0)
    # The mask id is above every id drawn.
    prompts = [rng.integers(0, config.vocab_size // 2, options.context).tolist() for _ in range(options.rows)]
    exact = equal_in_float32(config, options.devices)
    print(f"float32: {exact:.1%} of the tokens equal", flush=True)
    one, many = run(config, prompts, request, Herald(options.budget), options.devices, 2)
    rates = [result.stats.new_tokens / result.stats.decode_seconds for result in (one, many)]
    offload = many.stats.offload
    assert offload is not None
    detail = {
        "shape": options.shape, "context": options.context, "rows": options.rows, "blocks": options.blocks,
        "budget": options.budget, "one_device_tokens_per_second": rates[0], "speedup": rates[1] / rates[0],
        "equal_tokens": equal(one, many), "equal_tokens_first_block": equal(one, many, block),
        "equal_tokens_float32": exact, "host_memory": host_sharding(None).memory_kind,
        "host_bytes": offload.host_bytes, "fetched_bytes": offload.fetched_bytes, "scan_seconds": offload.scan_seconds,
        "decode_seconds": many.stats.decode_seconds, "prefill_seconds": many.stats.prefill_seconds,
    }  # fmt: skip
    rows = [common.row(f"mesh{options.devices}/throughput", rates[1], "tokens/s", detail=detail)]
    common.write_results("herald", rows, folder=options.out)
    common.print_rows(rows)
    return rows


if __name__ == "__main__":
    main(_options())
