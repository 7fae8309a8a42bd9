"""GPU kernels for block-diffusion decoding, each with a plain XLA form. Knows nothing of models."""

from pallas_kernels.block_attention import AttentionOutput, Importance, block_attention, page_sums
from pallas_kernels.gather_rows import gather_rows, scatter_rows, write_block
from pallas_kernels.reference import merge_by_lse
from pallas_kernels.topk import select_topk

__all__ = [
    "AttentionOutput",
    "Importance",
    "block_attention",
    "gather_rows",
    "merge_by_lse",
    "page_sums",
    "scatter_rows",
    "select_topk",
    "write_block",
]
