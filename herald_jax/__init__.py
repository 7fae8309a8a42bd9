"""herald_jax: block diffusion language models in JAX, with MAGE and HERALD sparse attention over long contexts."""

from herald_jax.config import DiffusionContract, GenerateConfig, ModelConfig, MoEConfig, RopeConfig
from herald_jax.denoise import Editing, EntropyBound, Sequential, StaticLowConfidence, Threshold
from herald_jax.errors import CheckpointError, ConfigError, ConversionError, GenerationError, HeraldError
from herald_jax.generate import BlockEvent, GenerateResult, generate, stream
from herald_jax.host_kv import allow_page_locking as _allow_page_locking
from herald_jax.loading import Model, load
from herald_jax.plans import Dense, Herald, Mage
from herald_jax.sharding import make_mesh
from herald_jax.stats import OffloadStats, Stats

__version__ = "0.1.0"

__all__ = [
    "BlockEvent",
    "CheckpointError",
    "ConfigError",
    "ConversionError",
    "Dense",
    "DiffusionContract",
    "Editing",
    "EntropyBound",
    "GenerateConfig",
    "GenerateResult",
    "GenerationError",
    "Herald",
    "HeraldError",
    "Mage",
    "MoEConfig",
    "Model",
    "ModelConfig",
    "OffloadStats",
    "RopeConfig",
    "Sequential",
    "StaticLowConfidence",
    "Stats",
    "Threshold",
    "generate",
    "load",
    "make_mesh",
    "stream",
]

_allow_page_locking()
