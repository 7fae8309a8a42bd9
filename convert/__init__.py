"""Conversion of published checkpoints into herald_jax checkpoints (`python -m convert`, `herald-convert`)."""
