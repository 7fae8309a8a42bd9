"""All kernels beside their floors and peers, in one run: `python -m benchmarks.kernels`.

Writes benchmarks/results/kernels-<device>.json. `--only attention` (or another of PARTS) runs and replaces one.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from benchmarks import common
from benchmarks.lowering import Workshop

PARTS = ("attention", "gather", "topk", "matmul", "index")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part alone; may be repeated")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, on any machine; writes no results")
    common.output_option(parser)
    options = parser.parse_args()
    context = {"copy_bandwidth": common.copy_bandwidth(2**20 if options.quick else 2**31), "quick": options.quick}
    print(f"{common.device_name()}: copy bandwidth {context['copy_bandwidth'] / 1e12:.2f} TB/s")
    found: list[dict[str, Any]] = []

    def save(rows: list[dict[str, Any]]) -> None:
        """Writes what earlier parts and this one have so far: a run that is cut short keeps it."""
        if not options.quick:
            common.write_results("kernels", found + rows, folder=options.out)

    with Workshop() as shop:
        for part in options.only or PARTS:
            rows = importlib.import_module(f"benchmarks.kernels_{part}").rows
            found += rows(context | {"save": save, "shop": shop})
            save([])
            common.stage(f"{part}: done")
    common.print_rows(found)


if __name__ == "__main__":
    main()
