"""The benchmarks of gather and top-k run their checks and name their rows, on tiny shapes."""

import pytest

from benchmarks import kernels_gather, kernels_index, kernels_matmul, kernels_topk


@pytest.mark.parametrize(
    ("module", "goals"),
    [
        (kernels_gather, {"gather/host/h2d_fraction", "gather/device/copy_fraction"}),
        (kernels_topk, set()),
        (kernels_matmul, set()),
        (kernels_index, set()),
    ],
    ids=["gather", "topk", "matmul", "index"],
)
def test_quick_rows(module, goals):
    rows = module.rows({"copy_bandwidth": 1e10, "quick": True})
    ids = [row["id"] for row in rows]
    assert len(set(ids)) == len(ids)
    assert {row["id"] for row in rows if "goal" in row} == goals
    assert all(row["value"] > 0 for row in rows)


def test_the_goals_case_is_measured():
    assert kernels_topk.GOAL in kernels_topk.CASES
    assert max(case.nbytes for case in kernels_gather.CASES) >= 4 * kernels_gather.BIG
