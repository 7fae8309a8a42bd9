"""All kernels beside their floors and peers, in one run: `python -m benchmarks.kernels`.

Writes benchmarks/results/kernels-<device>.json. `--only attention` (or another of PARTS) runs and replaces one.
"""

from __future__ import annotations

import argparse
import importlib

from benchmarks import common

PARTS = ("attention", "gather", "topk", "matmul")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part alone; may be repeated")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, on any machine; writes no results")
    common.output_option(parser)
    options = parser.parse_args()
    context = {"copy_bandwidth": common.copy_bandwidth(2**20 if options.quick else 2**31), "quick": options.quick}
    print(f"{common.device_name()}: copy bandwidth {context['copy_bandwidth'] / 1e12:.2f} TB/s")
    found = []
    for part in options.only or PARTS:
        found += importlib.import_module(f"benchmarks.kernels_{part}").rows(context)
        if not options.quick:  # after every part: a run that is cut short keeps what it has
            common.write_results("kernels", found, folder=options.out)
    common.print_rows(found)


if __name__ == "__main__":
    main()
