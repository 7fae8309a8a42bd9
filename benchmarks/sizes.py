"""How much data a measurement needs. No imports: shared with processes that hold no JAX."""

# The larger L2 of an H100 (50 MB) and an H200 (60 MB).
L2_BYTES = 60 * 2**20


def input_sets(bytes_per_set: int, *, at_most: int = 64) -> int:
    """How many inputs to rotate through so that together they are at least four times the L2."""
    return max(1, min(at_most, -(-4 * L2_BYTES // max(1, bytes_per_set))))
