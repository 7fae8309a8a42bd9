"""The optimiser step, the training state, and saving it: what `finetune` and the reference model's recipe share.

The master weights are float32, the forward pass runs in the model's dtype. A step is one jitted function of (state,
batch, learning rate); over a mesh the batch is split over "data" and parameters as `sharding.RULES` says.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from herald_jax import drawing, sharding
from herald_jax.config import ModelConfig
from herald_jax.errors import CheckpointError, ConfigError
from herald_jax.model import Params, flatten, param_specs, unflatten


@functools.partial(jax.tree_util.register_dataclass, data_fields=["step", "trained", "optimizer"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes: `step` i32, the trained tree (float32), the optimiser's own state."""

    step: jax.Array
    trained: Any
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW, or Muon for the matrices with AdamW for the rest, with gradients clipped by their global norm.

    Attributes:
      kind: "adamw", or "muon" (momentum made orthogonal, arXiv 2502.16982's scale, so that one learning rate and one
        decay serve both).
      weight_decay: on matrices only; norms, biases and embeddings have none.
    """

    kind: str = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    momentum: float = 0.95

    def __post_init__(self) -> None:
        if self.kind not in ("adamw", "muon"):
            raise ConfigError(f"optimizer is {self.kind!r}, but must be adamw or muon")

    def transform(self) -> Any:
        """The optax transformation; its updates still have to be scaled by minus the learning rate."""
        import optax

        adam = optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=1e-8)
        decay = optax.add_decayed_weights(self.weight_decay, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree))
        if self.kind == "adamw":
            return optax.chain(optax.clip_by_global_norm(self.clip), adam, decay)

        def label(tree: Any) -> Any:
            def of(path: Any, leaf: Any) -> str:
                names = "/".join(str(getattr(p, "key", p)) for p in path)
                return "matrix" if leaf.ndim > 1 and "embed" not in names and "head" not in names else "other"

            return jax.tree_util.tree_map_with_path(of, tree)

        muon = optax.partition({"matrix": _muon(self.momentum), "other": adam}, label)
        return optax.chain(optax.clip_by_global_norm(self.clip), muon, decay)


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Inputs and outputs of a kernel: split where the two sides are most alike."""
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return max(cuts, key=min)


def _orthogonal(x: jax.Array) -> jax.Array:
    """Newton-Schulz iteration of Muon (K. Jordan, 2024): the nearest semi-orthogonal matrix, approximately."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[0] > x.shape[1]
    y = (x.T if tall else x).astype(jnp.bfloat16)
    y = y / (jnp.linalg.norm(y.astype(jnp.float32)).astype(y.dtype) + 1e-7)
    for _ in range(5):
        gram = y @ y.T
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return (y.T if tall else y).astype(jnp.float32)


def _muon(momentum: float) -> Any:
    import optax

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        state = jax.tree.map(lambda m, g: momentum * m + g, state, grads)

        # Matrices of one shape are made orthogonal together: one batched iteration instead of one a layer.
        leaves, structure = jax.tree.flatten(jax.tree.map(lambda m, g: momentum * m + g, state, grads))
        alike: dict[tuple[int, ...], list[int]] = {}
        for i, leaf in enumerate(leaves):
            alike.setdefault(leaf.shape, []).append(i)
        for shape, members in alike.items():
            matrix = _as_matrix(shape)
            # Root mean square 0.2, which is what Adam's updates have.
            scale = 0.2 * math.sqrt(max(matrix))
            made = jax.vmap(_orthogonal)(jnp.stack([leaves[i].reshape(matrix) for i in members])) * scale
            for i, one in zip(members, made, strict=True):
                leaves[i] = one.reshape(shape)
        return jax.tree.unflatten(structure, leaves), state

    return optax.GradientTransformation(init, update)


def master(params: Params, mesh: Mesh | None = None, config: ModelConfig | None = None) -> Params:
    """`params` in float32; with a mesh, split as `config`'s parameters are."""
    leaves = {path: jnp.asarray(leaf, jnp.float32) for path, leaf in flatten(params).items()}
    if mesh is not None:
        assert config is not None
        specs = param_specs(config)
        leaves = {p: jax.device_put(leaf, sharding.param_sharding(specs[p], mesh)) for p, leaf in leaves.items()}
    return unflatten(leaves)


def init_state(trained: Any, optimizer: Optimizer, mesh: Mesh | None = None) -> TrainState:
    """The state before the first step. `trained` is copied: the state may be donated."""
    trained = jax.tree.map(lambda x: jnp.array(x, copy=True), trained)
    state = TrainState(jnp.zeros((), jnp.int32), trained, jax.jit(optimizer.transform().init)(trained))
    if mesh is None:  # named, or a restored state, which has a place, would be compiled for anew
        return jax.device_put(state, sharding.one_device())
    everywhere = NamedSharding(mesh, P())
    places = {_names(path): leaf.sharding for path, leaf in jax.tree_util.tree_flatten_with_path(trained)[0]}

    def place(path: Any, leaf: jax.Array) -> jax.Array:
        # A moment lies at the path of its parameter, below whatever optax put around it, and goes where that is.
        names = _names(path)
        found = [places[names[n:]] for n in range(len(names)) if names[n:] in places]
        return jax.device_put(leaf, found[0] if found and leaf.ndim else everywhere)

    moments = jax.tree_util.tree_map_with_path(place, state.optimizer)
    return TrainState(jax.device_put(state.step, everywhere), trained, moments)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(part) for part in path)


def place_batch(batch: Any, mesh: Mesh | None) -> Any:
    """A batch on its devices: rows split over "data". Raises ConfigError where they do not divide evenly."""
    if mesh is None:
        return jax.device_put(batch)
    data = mesh.shape["data"]
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % data:
        raise ConfigError(f"a batch of {rows} sequences cannot be split over {data} devices; use a multiple of {data}")
    return jax.tree.map(lambda x: jax.device_put(x, sharding.batch_sharding(mesh, x.ndim)), batch)


Loss = Callable[[Any, Any], tuple[jax.Array, Any]]


def make_step(loss: Loss, optimizer: Optimizer) -> Callable[[TrainState, Any, Any], tuple[TrainState, Any]]:
    """`step(state, batch, rate) -> (state, metrics)`, to be jitted with the state donated.

    `loss(trained, batch)` returns the scalar and a dict of further figures; `metrics` is that dict with "loss" and
    "grad_norm".
    """
    transform = optimizer.transform()

    def step(state: TrainState, batch: Any, rate: Any) -> tuple[TrainState, Any]:
        (value, figures), grads = jax.value_and_grad(loss, has_aux=True)(state.trained, batch)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))
        updates, moments = transform.update(grads, state.optimizer, state.trained)
        # A step whose gradient is not finite changes nothing but the count.
        fine = jnp.isfinite(norm)
        trained = jax.tree.map(lambda p, u: jnp.where(fine, p - rate * u, p), state.trained, updates)
        moments = jax.tree.map(lambda new, old: jnp.where(fine, new, old), moments, state.optimizer)
        return TrainState(state.step + 1, trained, moments), {**figures, "loss": value, "grad_norm": norm}

    return step


def warmup_cosine(step: int, total: int, *, peak: float, warmup: int, floor: float = 0.1) -> float:
    """The learning rate of `step` (from 0): linear up over `warmup` steps, then a cosine down to `floor * peak`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(total - warmup, 1))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def save_state(directory: str | Path, state: TrainState, *, keep: int = 2) -> None:
    """Write `directory/<step>` whole or not at all, and remove all but the newest `keep`."""
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
    with ocp.CheckpointManager(Path(directory).absolute(), options=options) as manager:
        manager.save(int(state.step), args=ocp.args.PyTreeSave(_as_dict(state)), force=True)


def restore_state(directory: str | Path, like: TrainState) -> TrainState | None:
    """The newest state under `directory`, placed like `like`; None if there is none.

    Raises CheckpointError if it is of another model or optimiser.
    """
    path = Path(directory).absolute()
    if not path.is_dir():
        return None
    with ocp.CheckpointManager(path) as manager:
        step = manager.latest_step()
        if step is None:
            return None
        wanted = _as_dict(like)
        restore = ocp.args.PyTreeRestore(wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted))
        try:
            found = manager.restore(step, args=restore)
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"{directory} holds the training state of another model or optimizer; "
                f"train into another directory ({str(error).splitlines()[0]})"
            ) from error
    return TrainState(
        found["step"],
        found["trained"],
        jax.tree.unflatten(
            jax.tree.structure(like.optimizer), [found["optimizer"][f"{i:05d}"] for i in range(len(found["optimizer"]))]
        ),
    )


def _as_dict(state: TrainState) -> dict[str, Any]:
    # The optimiser's state by number: its named tuples are optax's own business.
    moments = {f"{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(state.optimizer))}
    return {"step": state.step, "trained": state.trained, "optimizer": moments}


class Progress:
    """A bar with loss and tokens per second, and the curve that `plot_curve` draws."""

    def __init__(self, total: int, *, start: int = 0, tokens_per_step: int):
        pause = 0.5 if sys.stderr.isatty() else 10.0
        self._bar = tqdm(total=total, initial=start, unit="step", file=sys.stderr, mininterval=pause)
        self._tokens = tokens_per_step
        self._started, self._seen = time.perf_counter(), 0
        self.curve: list[tuple[int, float]] = []

    def add(self, step: int, loss: float) -> None:
        """After step number `step` (from 1)."""
        self._seen += 1
        rate = self._seen * self._tokens / (time.perf_counter() - self._started)
        self.curve.append((step, loss))
        self._bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s", refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


_CURVE = "the learning curve"


def check_curve(path: str | Path) -> None:
    """Before the training: raises ConfigError if `plot_curve` could not write to `path`, or without matplotlib (the
    extra `plot`)."""
    pyplot = drawing.pyplot(_CURVE)
    figure = pyplot.figure()
    kinds = figure.canvas.get_supported_filetypes()
    pyplot.close(figure)
    path = Path(path)
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise ConfigError(f"a curve cannot be drawn as {path.name}; let its name end in .png or .svg, for instance")
    if path.is_dir() or not path.parent.is_dir():
        where = f"{path} is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise ConfigError(f"the curve is to be a file, but {where}")


def plot_curve(curve: list[tuple[int, float]], path: str | Path, *, title: str = "training loss") -> None:
    """Write the learning curve as PNG, or what the name ends in. Raises ConfigError as `check_curve`, and OSError."""
    pyplot = drawing.pyplot(_CURVE)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    steps, losses = zip(*curve, strict=True)
    axes.plot(steps, losses, color="0.75", linewidth=0.8)
    window = max(1, len(losses) // 50)
    mean = [sum(losses[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(losses))]
    axes.plot(steps, mean, color="tab:blue")
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
