"""The errors a user can cause. Each carries one sentence: the value, what was expected, how to mend it."""


class HeraldError(ValueError):
    """Base of every error that bad input causes; command lines print it and exit with status 2."""


class ConfigError(HeraldError):
    """A model configuration is wrong, contradictory or incomplete."""


class CheckpointError(HeraldError):
    """A directory is not a readable herald_jax checkpoint."""


class ConversionError(HeraldError):
    """A source checkpoint cannot be converted."""


class GenerationError(HeraldError):
    """A generation request is invalid for the model it was made to."""
