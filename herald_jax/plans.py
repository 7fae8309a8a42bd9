"""The plans: which prefix entries a block may attend to while it is denoised, and where they live.

`Dense` attends to everything; `Mage` to a selection made at each block's first step; `Herald` to one made while the
block before is written, with the cache in host memory. Frozen, hashable, validated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from herald_jax.fields import MOST, ask, real, switch, whole

# What `Herald.keep_bonus` is by default where entries are reused.
KEEP_BONUS = 0.5


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
      rest: what a query still gets of the entries that are not selected. "drop": nothing, as in the paper. "keep"
        (ours): the attention over them as it was at the selecting step, as one more summand, for every position whose
        input is still the same (`rest.py`). Nearer to the dense plan at equal tokens, but what is written since
        changes what a position should look for, and the rest does not follow (docs/accuracy.md).
      min_budget: least entries whatever the fraction says (ours): 5 % of a short prompt is too little to read from.
      sinks, recent: first and last entries of the prefix that are always chosen, within the budget (ours).
      select_at_step: which denoising step selects; those before it are exact too (1 in the paper; 2 is reported better
        at equal budget).
      select_every: blocks that share one selection (ours; 1 is MAGE). The first of them selects as ever; the others are
        sparse from their first step, and attend to the selection and to all that was written since it was made, which
        stays in the pool beyond the budget. This is what MAGE can be at block length 1, autoregressive decoding, where
        a block has no later step to be sparse in: every so many tokens one is exact and chooses for those after it.
      selector: "mage", or a baseline to compare with: "oracle" (exact top-k anew at every step), "quest" (page-wise
        bounds from the minimum and maximum of the keys, arXiv 2406.10774), "tidal" (one layer's selection reused by the
        layers above it, after TidalDecode, arXiv 2410.05076), "random", "recent" (the last entries only).
      page_size: above 1, consecutive entries are chosen as pages of so many, by the mean of their scores (ours): less
        attention is kept, but what is kept is a broader sample, which counting tasks need. 1 is the paper's. None is
        8, but 16 for "quest", whose pages are its own, and 1 for the other baselines and "layer_adaptive".
      reselect_layers: layers at which "tidal" selects anew; None selects once, at the first sparse layer.
      measure: attend exactly beside every sparse step too, and report how good the selection still was: recall of
        that step's exact top entries, and the share of the prefix's attention kept, both by the queries of all that
        were masks when the block began (the paper's; with another `query`, of the mask that it names). Tokens do not
        change; time does. Not for "oracle", which has no earlier selection to judge.
      layer_spread: "layer_adaptive" only: no layer gets more than this many times the budget (ours: the pool has a
        static size). Where no layer wants more, the budgets are exactly the paper's. (A budget of the whole prefix is
        not shared out: every layer gets it.)
    """

    budget: float | int = 0.05
    query: Literal["all", "center", "first", "last"] = "all"
    reduce: Literal["mean", "max"] = "mean"
    normalise: Literal["prefix+block", "prefix"] = "prefix+block"
    allocate: Literal["uniform", "layer_adaptive"] = "uniform"
    dense_layers: int = 2
    rest: Literal["drop", "keep"] = "drop"
    min_budget: int = 256
    sinks: int = 0
    recent: int = 0
    select_at_step: int = 1
    select_every: int = 1
    selector: Literal["mage", "oracle", "quest", "tidal", "random", "recent"] = "mage"
    page_size: int | None = None
    reselect_layers: tuple[int, ...] | None = None
    layer_spread: float = 4.0
    measure: bool = False

    def __post_init__(self) -> None:
        _check_budget(self)
        choices: dict[str, tuple[str | int, ...]] = {
            "query": ("all", "center", "first", "last"),
            "reduce": ("mean", "max"),
            "normalise": ("prefix+block", "prefix"),
            "allocate": ("uniform", "layer_adaptive"),
            "selector": ("mage", "oracle", "quest", "tidal", "random", "recent"),
            "rest": ("drop", "keep"),
        }
        _check_choices(self, choices)
        for name, least in (("dense_layers", 0), ("select_at_step", 1), ("select_every", 1)):
            _check_integer(self, name, least)
        if self.page_size is not None:
            _check_integer(self, "page_size", 1)
        _check_switch(self, "measure")
        spread = real(self.layer_spread)
        ask(spread is not None and spread >= 1, f"layer_spread is {self.layer_spread!r}, but must be at least 1")
        _set(self, "layer_spread", spread)
        ask(
            self.allocate == "uniform" or self.selector == "mage",
            f"allocate 'layer_adaptive' goes with selector 'mage', not {self.selector!r}",
        )
        for name, plain in (("allocate", ("uniform",)), ("selector", ("mage", "oracle", "quest", "tidal"))):
            value = getattr(self, name)
            ask(self.page == 1 or value in plain, f"page_size above 1 goes with {name} {plain[0]!r}, not {value!r}")
        ask(
            not (self.measure and self.selector == "oracle"),
            "measure judges a selection at the steps after it, but selector 'oracle' selects anew at each",
        )
        if self.select_every > 1:
            for name, only in (("select_at_step", 1), ("measure", False)):
                value = getattr(self, name)
                ask(value == only, f"select_every above 1 goes with {name} {only}, not {value!r}")
            ask(self.selector != "oracle", "select_every above 1 shares selections, but selector 'oracle' keeps none")
            ask(self.rest != "keep", "rest 'keep' is of one block's queries, so it goes with select_every 1")
        ask(
            not (self.rest == "keep" and self.selector == "oracle"),
            "rest 'keep' carries a selecting step's attention to later ones, but selector 'oracle' selects at each",
        )
        if self.reselect_layers is not None:
            layers = self.reselect_layers
            ask(isinstance(layers, (tuple, list)), f"reselect_layers is {layers!r}, but must be layers: (2, 6)")
            numbers = tuple(map(whole, layers))
            ask(
                all(layer is not None and layer >= 0 for layer in numbers),
                f"reselect_layers is {layers!r}, but must be layers, which are integers of at least 0",
            )
            _set(self, "reselect_layers", numbers)
            ask(self.selector == "tidal", "reselect_layers goes with selector 'tidal' only")

    @property
    def page(self) -> int:
        """`page_size`, as given or by default."""
        if self.page_size is not None:
            return self.page_size
        return {"mage": 8 if self.allocate == "uniform" else 1, "quest": 16}.get(self.selector, 1)

    def __eq__(self, other: object) -> bool:
        return _same(self, other)

    def entries(self, prefix: int) -> int:
        """How many of `prefix` entries the budget pays for (before any layer-adaptive split)."""
        return _entries(self, prefix)


@dataclass(frozen=True)
class Herald:
    """HERALD (arXiv 2606.21633): the KV cache in host memory, and only selected entries of it on the device.

    What the paper's abstracts fix: the cache in host memory, a scan of all keys on the CPU once per block with a single
    `[MASK]` query per head, a draft block that lets the scan run while the block before is denoised, and two pools that
    take turns. The rest is ours, as each field says.

    Attributes:
      budget, min_budget, sinks, recent, page_size: as in `Mage`. The block just written is always attended to, beyond
        the budget.
      query: whose attention selects: "mean" (of the masks' query vectors: one query all the same), "center" (the
        `[MASK]` nearest the block's centre), "first" or "last" mask, or "all" masks (MAGE's, 32 times the CPU's
        arithmetic). Which one is ours; a single position misses what the others look for (docs/accuracy.md).
      reduce: "mean" or "max" of the softmax weight over those queries and the G heads of the KV head (ours).
      dense_layers: leading layers whose K and V stay in device memory and are attended to whole (ours; MAGE has 2).
      draft: True selects for a block while the block before it is written, from a draft of both. False selects at the
        block's own first step, exactly, by moving every layer's K and V through device memory once: MAGE's selection
        with the cache in host memory, and nothing hidden.
      draft_at: share of the block that must be revealed before the draft is made (ours). Earlier leaves more time to
        scan, later makes a better draft. "auto": under a policy of fixed steps as late as the scan and the fetch can
        still be hidden, by counting bytes (`draft_moment.py`), and never after 0.5; under the others at 0.5.
      selector: who scores the keys: "cpu" (the paper's), "index" (the device, on a quantised copy of K that it keeps;
        ours), "split" (the device for some layers, the CPU for the others; ours), or "auto" (measures the CPU's scan
        and the denoising steps on the first blocks, and moves to the index what the CPU cannot finish in time).
      scan: what scans on the CPU: "native" (C code that is compiled for the machine when it is first wanted; bfloat16
        only), "xla" (JAX's CPU backend), or "auto": native where that can be.
      index_bits: 8 or 4, of each number in the index.
      split: share of the layers that "split" scores on the device.
      reuse: copy entries that the current pool holds already on the device instead of fetching them again (ours).
      keep_bonus: what is added to the score of an entry that the current pool holds (of a page: for as much of it as it
        holds) when the next pool is chosen, as a share of that score (ours). Others replace it only if they are better
        by that factor, so fewer entries cross PCIe. A row's first selection has none to keep. None is `KEEP_BONUS` with
        `draft` and `reuse`, and 0 without, where nothing is kept from block to block.
      measure: read the device's clock when a block's fetch begins and ends, and when the steps beside it do: how long
        fetching took, and how much of that no step was left to hide. Three small launches a block; for `draft`, on one
        device.
    """

    budget: float | int = 0.05
    query: Literal["mean", "center", "first", "last", "all"] = "mean"
    reduce: Literal["mean", "max"] = "mean"
    dense_layers: int = 0
    min_budget: int = 256
    sinks: int = 0
    recent: int = 0
    page_size: int = 16
    draft: bool = True
    draft_at: float | Literal["auto"] = 0.5
    selector: Literal["cpu", "index", "split", "auto"] = "cpu"
    scan: Literal["auto", "native", "xla"] = "auto"
    index_bits: int = 8
    split: float = 0.5
    reuse: bool = True
    keep_bonus: float | None = None
    measure: bool = False

    def __post_init__(self) -> None:
        _check_budget(self)
        _check_choices(
            self,
            {
                "query": ("mean", "center", "first", "last", "all"),
                "reduce": ("mean", "max"),
                "selector": ("cpu", "index", "split", "auto"),
                "scan": ("auto", "native", "xla"),
                "index_bits": (8, 4),
            },
        )
        for name in ("draft", "reuse", "measure"):
            _check_switch(self, name)
        for name, least in (("dense_layers", 0), ("page_size", 1)):
            _check_integer(self, name, least)
        for name, also in (("draft_at", ' or "auto"'), ("split", "")):
            value = getattr(self, name)
            if also and isinstance(value, str) and value == "auto":
                continue
            share = real(value)
            ask(share is not None and 0 <= share <= 1, f"{name} is {value!r}, but must be a fraction in [0, 1]{also}")
            _set(self, name, share)
        ask(self.draft or not self.measure, "measure is of fetches beside a block's steps: it goes with draft True")
        if self.keep_bonus is not None:
            bonus = real(self.keep_bonus)
            ask(
                bonus is not None and 0 <= bonus <= MOST,
                f"keep_bonus is {self.keep_bonus!r}, but must be a finite number of at least 0 and at most {MOST}",
            )
            _set(self, "keep_bonus", bonus)
            for name in ("draft", "reuse"):
                ask(
                    not self.keep_bonus or getattr(self, name),
                    f"keep_bonus is {self.keep_bonus!r}, but with {name} False no entry is kept from block to block",
                )

    @property
    def page(self) -> int:
        """`page_size`."""
        return self.page_size

    @property
    def bonus(self) -> float:
        """`keep_bonus`, as given or by default."""
        if self.keep_bonus is not None:
            return self.keep_bonus
        return KEEP_BONUS if self.draft and self.reuse else 0.0

    def __eq__(self, other: object) -> bool:
        return _same(self, other)

    def entries(self, prefix: int) -> int:
        """How many of `prefix` entries the budget pays for."""
        return _entries(self, prefix)


def _same(plan: Mage | Herald, other: Any) -> bool:
    """As dataclasses compare, but a budget of 1, which is an entry, is not that of 1.0, which is the whole prefix: what
    was compiled for one must not run for the other."""
    if type(other) is not type(plan):
        return NotImplemented
    return type(plan.budget) is type(other.budget) and vars(plan) == vars(other)


def _entries(plan: Mage | Herald, prefix: int) -> int:
    # Less a thousandth, so that 0.07 * 100 is 7 in float64 here and in float32 in `select.budget_of` alike.
    wanted = plan.budget if isinstance(plan.budget, int) else math.ceil(plan.budget * prefix - 1e-3)
    return min(prefix, max(wanted, plan.min_budget, plan.sinks + plan.recent))


def _check_budget(plan: Mage | Herald) -> None:
    count, share = whole(plan.budget), real(plan.budget)
    ask(
        0 < count <= MOST if count is not None else share is not None and 0 < share <= 1,
        f"budget is {plan.budget!r}, but must be a fraction in (0, 1] or a positive number of entries, at most {MOST}",
    )
    _set(plan, "budget", share if count is None else count)
    for name in ("min_budget", "sinks", "recent"):
        _check_integer(plan, name, 0)
    always = plan.sinks + plan.recent
    ask(
        count is None or always <= max(count, plan.min_budget),
        f"sinks and recent are {always} entries together, but budget {plan.budget} and min_budget allow less",
    )


def _check_choices(plan: Mage | Herald, choices: dict[str, tuple[str | int, ...]]) -> None:
    for name, allowed in choices.items():
        value = getattr(plan, name)
        found = str(value) if isinstance(value, str) else whole(value)
        ask(found in allowed, f"{name} is {value!r}, but must be one of {', '.join(map(str, allowed))}")
        _set(plan, name, found)


def _check_integer(plan: Mage | Herald, name: str, least: int) -> None:
    value = getattr(plan, name)
    number = whole(value)
    ask(
        number is not None and least <= number <= MOST,
        f"{name} is {value!r}, but must be an integer of at least {least} and at most {MOST}",
    )
    _set(plan, name, number)


def _check_switch(plan: Mage | Herald, name: str) -> None:
    value = getattr(plan, name)
    ask(switch(value) is not None, f"{name} is {value!r}, but must be True or False")
    _set(plan, name, switch(value))


def _set(plan: Mage | Herald, name: str, value: object) -> None:
    object.__setattr__(plan, name, value)  # NumPy's number as Python's: a plan is static, its numbers its name


Plan = Dense | Mage | Herald
