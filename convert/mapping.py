"""A family's rules applied to the tensors of a checkpoint, and every way in which the two can fail to fit.

All problems are reported at once: unmatched, doubly matched, doubly set, never filled, wrong shape, wrong kind of
number, experts in two layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from convert.moe_rules import ALL_RULES
from convert.rules import EMBED, HEAD, Match, Rule, Transform
from convert.source import TensorInfo
from herald_jax.config import ModelConfig
from herald_jax.model import ParamSpec, param_specs

__all__ = ["EMBED", "HEAD", "LeafPlan", "Plan", "plan"]


@dataclass
class LeafPlan:
    """One parameter and the tensors that fill it, by part. Parts of single experts are named "gate 17"."""

    path: str
    spec: ParamSpec
    sources: dict[str, tuple[str, Transform]] = field(default_factory=dict)


@dataclass
class Plan:
    """The mapping of a whole checkpoint. `problems` empty means that every parameter is filled exactly once.

    Attributes:
      leaves: by parameter path, in the order in which their tensors lie in the files.
      ignored: tensors that a rule ignores, with the reason.
      compare_head: lm_head.weight is present although tied: it must equal the embedding (checked by reading both).
    """

    leaves: dict[str, LeafPlan]
    ignored: dict[str, str]
    problems: list[str]
    compare_head: bool = False


def plan(config: ModelConfig, tensors: Mapping[str, TensorInfo], rules: tuple[Rule, ...] | None = None) -> Plan:
    """Match `tensors` against the family's rules (or `rules`) and collect every problem. Reads no tensor."""
    rules = ALL_RULES[config.family] if rules is None else rules
    leaves = {path: LeafPlan(path, spec) for path, spec in param_specs(config).items()}
    result = Plan({}, {}, [])
    matched = _matched(config, tensors, rules, result)
    layout = _layout(matched, result)
    touched: set[tuple[str, str]] = set()
    for name, (rule, match) in matched.items():
        info = tensors[name]
        if rule.path is None or rule.transform is None:
            result.ignored[name] = "follows from the configuration"
            continue
        if rule.layouts and layout is None:
            continue  # two layouts: that was said, and what they do to each other would only drown it
        path, part = rule.path.replace("{layer}", match.layer), _part(rule.transform, match.expert)
        if path not in leaves:
            if name == HEAD and config.tie_word_embeddings:
                result.compare_head = True
                result.ignored[name] = "tied to the embedding"
            else:
                result.problems.append(_superfluous(name, match, config))
                continue
        elif match.expert and config.moe is not None and int(match.expert) >= config.moe.num_experts:
            result.problems.append(_superfluous(name, match, config))
            continue
        elif part in leaves[path].sources:
            earlier = leaves[path].sources[part][0]
            result.problems.append(f"{path} ({part}) is set by both {earlier} and {name}")
            continue
        else:
            leaves[path].sources[part] = (name, rule.transform)
        touched.add((path, part))
        expected = rule.transform.shape(config)
        if info.shape != expected:
            result.problems.append(f"{name} has shape {list(info.shape)} instead of {list(expected)}")
        if info.dtype is None:
            result.problems.append(
                f"{name} is stored as {info.stored}, which cannot be converted; use unquantised weights"
            )
    by_path: dict[str, list[Rule]] = {}
    for rule in rules:
        if rule.path is not None:
            by_path.setdefault(rule.path, []).append(rule)
    for path, leaf in leaves.items():
        needed: dict[str, str] = {}
        for part, sentence in _needed(path, by_path, layout, config):
            needed.setdefault(part, sentence)
        if not needed:
            if layout is not None or "/experts/" not in path:
                result.problems.append(f"no rule fills {path} (all)")
            continue
        result.problems += [sentence for part, sentence in needed.items() if (path, part) not in touched]
        leaf.sources = {part: leaf.sources[part] for part in needed if part in leaf.sources}
    result.leaves = dict(sorted(leaves.items(), key=lambda item: _position(item[1], tensors)))
    return result


def _part(transform: Transform, expert: str) -> str:
    return f"{transform.part} {expert}" if expert else transform.part


def _matched(
    config: ModelConfig, tensors: Mapping[str, TensorInfo], rules: tuple[Rule, ...], result: Plan
) -> dict[str, tuple[Rule, Match]]:
    """The rule of every tensor that has exactly one."""
    found = {}
    for name in sorted(tensors, key=_natural):
        matches = [(rule, match) for rule in rules if (match := rule.match(name)) is not None]
        if not matches:
            result.problems.append(f"{name} {list(tensors[name].shape)} is unknown to family {config.family}")
        elif len(matches) > 1:
            said = " and ".join(rule.pattern for rule, _ in matches)
            result.problems.append(f"{name} matches two rules, {said}")
        else:
            found[name] = matches[0]
    return found


def _layout(matched: Mapping[str, tuple[Rule, Match]], result: Plan) -> str | None:
    """How the experts are laid out: "per expert" where there are none, None (and a problem) where it is two ways."""
    seen: dict[tuple[str, ...], str] = {}
    for name, (rule, _) in matched.items():
        if rule.layouts:
            seen.setdefault(rule.layouts, name)
    for layout in ("per expert", "stacked", "fused", "dInfer"):
        if all(layout in layouts for layouts in seen):
            return layout
    # Tensors that go with several layouts contradict nobody; name two that do.
    (first, a), (second, b), *_ = sorted(seen.items(), key=lambda item: len(item[0]))
    result.problems.append(
        f"the experts are in two layouts at once, {first[0]} ({a}) and {second[0]} ({b}); one of them must go"
    )
    return None


def _superfluous(name: str, match: Match, config: ModelConfig) -> str:
    if match.layer and int(match.layer) >= config.num_layers:
        return f"{name} belongs to layer {match.layer}, but num_hidden_layers is {config.num_layers}"
    if match.expert and config.moe is not None and int(match.expert) >= config.moe.num_experts:
        return f"{name} belongs to expert {match.expert}, but num_experts is {config.moe.num_experts}"
    return f"{name} has no place in this configuration (family {config.family}: {_switches(config)})"


def _switches(config: ModelConfig) -> str:
    names = ("qkv_bias", "out_bias", "qk_norm", "tie_word_embeddings")
    said = ", ".join(f"{name} {str(getattr(config, name)).lower()}" for name in names)
    dense = 0 if config.moe is None else config.moe.first_dense_layers
    return f"{said}, first_k_dense_replace {dense}" if dense else said


def _needed(
    path: str, by_path: Mapping[str, list[Rule]], layout: str | None, config: ModelConfig
) -> Iterator[tuple[str, str]]:
    """The parts that a parameter must be filled with, in order, each with the sentence for its absence."""
    _, layer, *rest = path.split("/") if path.startswith("layers/") else ("", "")
    pattern = "/".join(["layers", "{layer}", *rest]) if layer else path
    for rule in by_path.get(pattern, []):
        if rule.transform is None or (rule.layouts and layout not in rule.layouts):
            continue
        experts = [""]
        if config.moe is not None and "{expert}" in rule.pattern:
            experts = [str(i) for i in range(config.moe.num_experts)]
        for expert in experts:
            name = rule.pattern.replace("{layer}", layer).replace("{expert}", expert)
            why = " (tie_word_embeddings is false)" if name == HEAD else ""
            if name.endswith(".expert_bias"):
                why = " (a buffer beside the router's weight, which tools drop; without it the router errs)"
            sentence = f"{name} {list(rule.transform.shape(config))} is missing{why}"
            yield _part(rule.transform, expert), sentence


def _position(leaf: LeafPlan, tensors: Mapping[str, TensorInfo]) -> tuple[str, int]:
    places = [(tensors[name].file, tensors[name].offset) for name, _ in leaf.sources.values()]
    return min(places, default=("", 0))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in name.split(".")]
