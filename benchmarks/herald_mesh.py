"""`python -m benchmarks.herald_mesh`: HERALD over two devices of one host, beside one device.

The whole path through `generate`, prefill included: random weights in a real shape, bfloat16, random prompts, blocks of
32 in fixed steps. Each device keeps its own KV heads in host memory of its own, chooses, fetches and appends them.
Writes the row `mesh<devices>/throughput`: new tokens per second of decoding on the mesh, and what one device does with
the same request. Sums over two devices round differently, so tokens of random weights part at near ties; the row says
how many were equal.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np

from benchmarks import common
from benchmarks.shapes import SHAPES
from herald_jax import GenerateConfig, Herald, Model, StaticLowConfidence, generate
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


def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    config = SHAPES[options.shape]
    block = config.diffusion.block_length
    request = GenerateConfig(
        max_new_tokens=options.blocks * block, policy=StaticLowConfidence(block), ignore_stop=True, prefill_chunk=4096
    )
    rng = np.random.default_rng(0)
    # The mask id is above every id drawn.
    prompts = [rng.integers(0, config.vocab_size // 2, options.context).tolist() for _ in range(options.rows)]
    plan = Herald(options.budget)
    found = {}
    for name, mesh in (("one", None), ("mesh", make_mesh(model=options.devices))):
        model = Model.from_params(config, init_params(config, jax.random.key(0)), mesh=mesh)
        generate(model, prompts, request, plan)  # compiles, and page-locks host memory for the first time
        found[name] = generate(model, prompts, request, plan)
        stats = found[name].stats
        print(name, f"{stats.new_tokens / stats.decode_seconds:.1f} tokens/s", *stats.lines(), sep="\n  ", flush=True)
        del model
    pairs = list(zip(found["one"].tokens, found["mesh"].tokens, strict=True))
    equal = float(np.mean([np.mean(np.asarray(a) == np.asarray(b)) for a, b in pairs]))
    first = float(np.mean([np.mean(np.asarray(a)[:block] == np.asarray(b)[:block]) for a, b in pairs]))
    rate = {name: got.stats.new_tokens / got.stats.decode_seconds for name, got in found.items()}
    offload = found["mesh"].stats.offload
    assert offload is not None
    detail = {
        "shape": options.shape, "context": options.context, "rows": options.rows, "blocks": options.blocks,
        "budget": options.budget, "one_device_tokens_per_second": rate["one"], "speedup": rate["mesh"] / rate["one"],
        "equal_tokens": equal, "equal_tokens_first_block": first, "host_memory": host_sharding(None).memory_kind,
        "host_bytes": offload.host_bytes, "fetched_bytes": offload.fetched_bytes, "scan_seconds": offload.scan_seconds,
        "decode_seconds": found["mesh"].stats.decode_seconds, "prefill_seconds": found["mesh"].stats.prefill_seconds,
    }  # fmt: skip
    rows = [common.row(f"mesh{options.devices}/throughput", rate["mesh"], "tokens/s", detail=detail)]
    common.write_results("herald", rows, folder=options.out)
    common.print_rows(rows)
    return rows


if __name__ == "__main__":
    main(_options())
