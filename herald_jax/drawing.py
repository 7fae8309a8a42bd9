"""matplotlib, which only the extra `plot` brings: asked for in one place, and before the work whose curve it draws."""

from __future__ import annotations

from typing import Any

from herald_jax.errors import ConfigError


def pyplot(what: str) -> Any:
    """`matplotlib.pyplot`, drawing to files. Raises ConfigError, which names `what` needs it, where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"{what} needs matplotlib; install herald-jax[plot]") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
