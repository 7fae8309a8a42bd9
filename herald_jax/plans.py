"""The plans: which prefix entries a block may attend to while it is denoised, and where they live.

`Dense` attends to everything; `Mage` to a selection made at each block's first step. Frozen, hashable, validated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from herald_jax.errors import GenerationError


@dataclass(frozen=True)
class Dense:
    """The plan without selection: every block attends to the whole prefix, which stays in device memory."""


@dataclass(frozen=True)
class Mage:
    """MAGE (arXiv 2602.14209): exact attention at a block's first step chooses what its later steps may attend to.

    Defaults are the paper's version 2 (training-free, uniform budget) unless a field says "ours".

    Attributes:
      budget: prefix entries per layer and KV head: a fraction of the row's prefix (float in (0, 1]) or a number (int).
      query: whose attention counts. "all": every masked position of the block (v2); "center", "first", "last": the
        masked position nearest the block's centre, the leftmost, the rightmost (HERALD's single query).
      reduce: "mean" (v2) or "max" of the softmax weight, over those queries and the G heads of the KV head. "max" is
        ours, after reports that it keeps rare entries that aggregation tasks need.
      normalise: what the weights are normalised over: "prefix+block" (ours, default) or "prefix" alone. Published
        implementations differ.
      allocate: "uniform" (v2) or "layer_adaptive" (v1: layers whose queries disagree, or whose top entries cover less
        of the attention, get more; see `select.layer_budgets`).
      dense_layers: leading layers that always attend to the whole prefix (v2: 2).
      min_budget: least entries whatever the fraction says (ours): 5 % of a short prompt is too little to read from.
      sinks, recent: first and last entries of the prefix that are always chosen, within the budget (ours).
      select_at_step: which denoising step selects; those before it are exact too (1 in the paper; 2 is reported better
        at equal budget).
      selector: "mage", or a baseline to compare with: "oracle" (exact top-k anew at every step), "quest" (page-wise
        bounds from the minimum and maximum of the keys, arXiv 2406.10774), "tidal" (one layer's selection reused by the
        layers above it, after TidalDecode, arXiv 2410.05076), "random", "recent" (the last entries only).
      page_size: entries per page of "quest".
      reselect_layers: layers at which "tidal" selects anew; None selects once, at the first sparse layer.
      measure: attend exactly beside every sparse step too, and report how good the selection still was: recall of
        that step's exact top entries, and the share of the prefix's attention kept. Tokens do not change; time does.
        Not for "oracle", which has no earlier selection to judge.
      layer_spread: "layer_adaptive" only: no layer gets more than this many times the budget (ours: the pool has a
        static size). Where no layer wants more, the budgets are exactly the paper's.
    """

    budget: float | int = 0.05
    query: Literal["all", "center", "first", "last"] = "all"
    reduce: Literal["mean", "max"] = "mean"
    normalise: Literal["prefix+block", "prefix"] = "prefix+block"
    allocate: Literal["uniform", "layer_adaptive"] = "uniform"
    dense_layers: int = 2
    min_budget: int = 256
    sinks: int = 0
    recent: int = 0
    select_at_step: int = 1
    selector: Literal["mage", "oracle", "quest", "tidal", "random", "recent"] = "mage"
    page_size: int = 16
    reselect_layers: tuple[int, ...] | None = None
    layer_spread: float = 4.0
    measure: bool = False

    def __post_init__(self) -> None:
        whole = isinstance(self.budget, int) and not isinstance(self.budget, bool)
        _ask(
            self.budget > 0 if whole else isinstance(self.budget, float) and 0 < self.budget <= 1,
            f"budget is {self.budget!r}, but must be a fraction in (0, 1] or a positive number of entries",
        )
        choices = {
            "query": ("all", "center", "first", "last"),
            "reduce": ("mean", "max"),
            "normalise": ("prefix+block", "prefix"),
            "allocate": ("uniform", "layer_adaptive"),
            "selector": ("mage", "oracle", "quest", "tidal", "random", "recent"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            _ask(value in allowed, f"{name} is {value!r}, but must be one of {', '.join(allowed)}")
        for name, least in (
            ("dense_layers", 0),
            ("min_budget", 0),
            ("sinks", 0),
            ("recent", 0),
            ("select_at_step", 1),
            ("page_size", 1),
        ):
            value = getattr(self, name)
            ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
            _ask(ok, f"{name} is {value!r}, but must be an integer of at least {least}")
        _ask(self.layer_spread >= 1, f"layer_spread is {self.layer_spread!r}, but must be at least 1")
        _ask(
            self.allocate == "uniform" or self.selector == "mage",
            f"allocate 'layer_adaptive' goes with selector 'mage', not {self.selector!r}",
        )
        _ask(
            not (self.measure and self.selector == "oracle"),
            "measure judges a selection at the steps after it, but selector 'oracle' selects anew at each",
        )
        if self.reselect_layers is not None:
            object.__setattr__(self, "reselect_layers", tuple(self.reselect_layers))
            _ask(self.selector == "tidal", "reselect_layers goes with selector 'tidal' only")
        always = self.sinks + self.recent
        _ask(
            not whole or always <= max(self.budget, self.min_budget),
            f"sinks and recent are {always} entries together, but budget {self.budget} and min_budget allow less",
        )

    def entries(self, prefix: int) -> int:
        """How many of `prefix` entries the budget pays for (before any layer-adaptive split)."""
        # Less a thousandth, so that 0.07 * 100 is 7 in float64 here and in float32 in `select.budget_of` alike.
        wanted = self.budget if isinstance(self.budget, int) else math.ceil(self.budget * prefix - 1e-3)
        return min(prefix, max(wanted, self.min_budget, self.sinks + self.recent))


Plan = Dense | Mage


def _ask(condition: bool, message: str) -> None:
    if not condition:
        raise GenerationError(message)
