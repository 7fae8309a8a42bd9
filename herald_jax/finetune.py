"""`herald-finetune`: go on training a converted checkpoint, plainly or for MAGE's sparse attention.

The loss, a step and the loop of steps are `finetune_step.py`. `--lora` trains low-rank additions only. A run continues
from its own state (`OUTPUT.state`) and then follows the same trajectory.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax import cli_arguments, joined_layers, lora, sharding, tasks, training
from herald_jax.checkpoint import check_destination, load_checkpoint, save_checkpoint
from herald_jax.config import GenerateConfig, ModelConfig
from herald_jax.errors import GenerationError, HeraldError
from herald_jax.fields import FLOAT32_MOST
from herald_jax.finetune_step import LossOptions, make_finetune_step, train
from herald_jax.model import flatten, param_specs, unflatten
from herald_jax.objective import check_family
from herald_jax.plans import Dense
from herald_jax.publish import whole_file
from herald_jax.request import check_request
from herald_jax.text import load_tokenizer
from herald_jax.train_attention import CLEAN_CHUNK
from herald_jax.train_data import Source, TaskRows, TextRows, Turns

# Flags with which a run may go on: the trajectory is the same with others, but for the rate's, which follows --steps.
_NO_MATTER = {"output", "steps", "save_every", "devices", "attention", "no_remat", "curve", "force"}
# Steps of each length among which one must have something to learn.
_LOOKS = 8


def memory_lines(
    config: ModelConfig, *, batch: int, length: int, copies: int, rank: int | None, passes: int, remat: bool = True,
    cudnn: bool = False,
) -> list[str]:  # fmt: skip
    """What a step needs on one device, by a formula, in GiB; written for a user who must choose sizes beforehand.

    `passes` is how often each noisy block is run: once, for MAGE twice, with its first canvas three times. cuDNN's
    attention keeps no scores.
    """
    parameters = sum(int(np.prod(spec.shape)) for spec in param_specs(config).values())
    itemsize = jnp.dtype(config.dtype).itemsize
    noisy = 2 * copies * config.diffusion.block_length  # two complementary masks
    tokens = batch * (length + noisy * passes)
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    layer = (parameters - config.vocab_size * width * (1 if config.tie_word_embeddings else 2)) / config.num_layers
    parts: dict[str, float] = {}
    if rank is None:
        # float32 master weights and two moments, their gradient, and the copy that the forward pass computes in.
        parts["weights, optimizer state and gradient"] = parameters * (16 + itemsize)
    else:
        adapted = (
            config.num_layers * rank * (2 * width + 2 * heads + 2 * kv_heads + 3 * config.intermediate_size + width)
        )
        parts["frozen weights"] = parameters * itemsize
        parts["adapters, their state and gradient"] = adapted * 16
        parts["one merged layer and its gradient"] = layer * (itemsize + 4) * 2
    parts["layer inputs kept"] = config.num_layers * tokens * width * itemsize
    activations = tokens * (4 * width + 2 * (heads + kv_heads) + 6 * config.intermediate_size) * itemsize
    if remat:
        parts["one layer's activations"] = activations * 2
    else:
        parts["all layers' activations"] = activations * (config.num_layers + 1)
    if not cudnn:
        parts["attention scores of a chunk"] = 3 * 4 * batch * config.num_heads * min(CLEAN_CHUNK, length) * length
    parts["logits of a chunk"] = 3 * min(512 << 20, batch * noisy * config.vocab_size * 4)
    if passes > 1:
        kept = 1 if remat else config.num_layers
        parts["chosen entries"] = kept * 2 * batch * copies * config.num_kv_heads * length
    lines = [f"{name:<42}{size / 2**30:8.2f} GiB" for name, size in parts.items()]
    return [*lines, f"{'together, about':<42}{sum(parts.values()) / 2**30:8.2f} GiB"]


def _parser() -> argparse.ArgumentParser:
    parser = cli_arguments.CommandParser(
        prog="herald-finetune", description="Train a converted checkpoint further, plainly or for MAGE."
    )
    parser.add_argument("checkpoint", help="directory written by herald-convert")
    parser.add_argument("output", help="directory to write the trained checkpoint to")
    parser.add_argument("--data", metavar="F", help='text, or a .jsonl of objects with "text" or "prompt" and "answer"')
    parser.add_argument("--tasks", metavar="T,T", help=f"or synthetic tasks: all, or some of {', '.join(tasks.TASKS)}")
    parser.add_argument("--haystack", metavar="F", help="text to hide the tasks in (default: the package's own)")
    parser.add_argument(
        "--length", default="2048", metavar="N[,N]", help="tokens of a row, or several, in turn (default %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N",
        help="rows of a step (default %(default)s); of another than the first length, as many as have as many tokens",
    )  # fmt: skip
    parser.add_argument(
        "--copies", type=int, metavar="S", help="noisy blocks of a row (default: a quarter of its blocks)"
    )
    parser.add_argument("--steps", type=int, default=150, metavar="N", help="default %(default)s")
    parser.add_argument("--learning-rate", type=float, metavar="R", help="default 1e-5, with LoRA 2e-4")
    parser.add_argument("--warmup", type=int, default=10, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--final-rate", type=float, default=0.1, metavar="P", help="share of the rate left at the end (default 0.1)"
    )
    parser.add_argument(
        "--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: for matrices (default: adamw)"
    )
    parser.add_argument(
        "--no-remat", action="store_true", help="keep all activations: a fifth less work, far more memory"
    )
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank instead of the weights")
    parser.add_argument(
        "--kl", type=float, default=1.0, metavar="L", help="mage: weight of KL(sparse || exact) (default 1)"
    )
    parser.add_argument(
        "--exact",
        type=float,
        default=0.0,
        metavar="W",
        help="mage: weight of the exact pass's cross-entropy (default 0)",
    )
    parser.add_argument(
        "--canvas", choices=["noisy", "first"], default="noisy",
        help="mage: which state of a block chooses its entries, the noisy one or the first (default: noisy)",
    )  # fmt: skip
    parser.add_argument(
        "--full", type=float, default=0.25, metavar="P", help="share of wholly masked blocks (default 0.25)"
    )
    cli_arguments.add_plan(parser)
    parser.add_argument("--attention", choices=["xla", "cudnn"], help="how to attend (default: xla)")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="split the batch over N devices")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--save-every", type=int, default=50, metavar="N", help="steps between states (default 50)")
    parser.add_argument("--curve", metavar="F", help="write the learning curve as PNG")
    parser.add_argument("--force", action="store_true", help="replace the output if it exists")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status and never raises for what a user can cause."""
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except KeyboardInterrupt:
        return cli_arguments.interrupted("interrupted; the same command continues from the last saved state", argv)
    except (HeraldError, OSError) as error:
        return cli_arguments.fail(error)
    except jax.errors.JaxRuntimeError as error:
        return cli_arguments.out_of_memory(
            error, "lower --batch-size, --length or --copies, train adapters (--lora), or give more --devices"
        )
    return 0


def _run(args: argparse.Namespace) -> None:
    if (args.data is None) == (args.tasks is None):
        raise GenerationError("give either --data or --tasks, so that there is something to train on")
    for name in ("batch_size", "steps", "devices", "save_every", "copies", "warmup"):
        least = int(name != "warmup")
        value = getattr(args, name)
        if value is not None and value < least:
            raise GenerationError(f"{cli_arguments.flag_of(name)} is {value}, but must be at least {least}")
    for name, of in (("final_rate", "the rate"), ("full", "the blocks")):
        if not 0 <= getattr(args, name) <= 1:
            raise GenerationError(
                f"{cli_arguments.flag_of(name)} is {getattr(args, name)}, but must be a share of {of}, from 0 to 1"
            )
    if not -(2**63) <= args.seed < 2**63:
        raise GenerationError(f"--seed is {args.seed}, but must be an integer of 64 bits")
    if args.curve is not None:
        training.check_curve(args.curve)
    if args.learning_rate is not None and not 0 < args.learning_rate <= FLOAT32_MOST:
        raise GenerationError(f"--learning-rate is {args.learning_rate}, but must be a positive number")
    if args.attention == "cudnn" and jax.default_backend() != "gpu":
        raise GenerationError(f"--attention cudnn needs an NVIDIA GPU, but JAX runs on {jax.default_backend()}")
    options = LossOptions(
        cli_arguments.build_plan(args), args.kl, args.exact, args.canvas, lora_alpha=float(2 * (args.lora or 1)),
        remat=not args.no_remat, implementation=args.attention,
    )  # fmt: skip
    check_destination(Path(args.output), force=args.force)
    mesh = sharding.normalise_mesh(sharding.make_mesh(data=args.devices)) if args.devices > 1 else None
    place = (lambda _, spec: sharding.param_sharding(spec, mesh)) if mesh is not None else None
    found = load_checkpoint(args.checkpoint, sharding_for=place)
    config = found.config
    block = config.diffusion.block_length
    check_request(config, GenerateConfig(), options.plan, [])
    check_family(config.diffusion)
    if found.tokenizer_dir is None:
        raise GenerationError(f"{args.checkpoint} carries no tokenizer, which the training text needs")
    lengths = _lengths(args.length, block, config.max_position_embeddings)
    # As many tokens in every step, in rows that split over the devices.
    batches = [max(1, args.batch_size * lengths[0] // n // args.devices) * args.devices for n in lengths]
    batches[0] = args.batch_size
    source = _source(args, config, load_tokenizer(found.tokenizer_dir), lengths, batches)
    for turn, length in enumerate(lengths):
        steps = range(turn, turn + _LOOKS * len(lengths), len(lengths))
        if not any(source.rows(step).maskable.any() for step in steps):
            raise GenerationError(
                f"rows of {length} tokens end before the answers that are to be learned; give a longer --length"
            )
    print("memory of a step, by formula:", file=sys.stderr)
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    for line in memory_lines(
        config, batch=-(-batches[longest] // args.devices), length=lengths[longest],
        copies=_copies(args, lengths[longest], block), rank=args.lora,
        passes=1 if isinstance(options.plan, Dense) else 3 if options.canvas == "first" else 2, remat=options.remat,
        cudnn=options.implementation == "cudnn",
    ):  # fmt: skip
        print(f"  {line}", file=sys.stderr)

    optimizer = training.Optimizer(args.optimizer, weight_decay=0.0)
    # Each number is kept on the device once: a name for what was loaded, or for what the state is a copy of, would hold
    # another 6 bytes a parameter to the end.
    loaded, found = found.params, dataclasses.replace(found, params={})
    frozen = None if args.lora is None else joined_layers.join(loaded)
    if args.lora is None:
        trained: Any = training.master(loaded, mesh, config)
    else:
        trained = lora.init_adapters(config, args.lora, jax.random.key(args.seed))
        if mesh is not None:
            everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            trained = jax.device_put(trained, everywhere)
    state = training.init_state(trained, optimizer, mesh)
    del loaded, trained
    directory = Path(f"{args.output}.state")
    resumed = training.restore_state(directory, state)
    _same_settings(directory, cli_arguments.settings(args, _NO_MATTER, [args.data, args.haystack]), resumed is not None)
    if resumed is not None:
        print(f"continuing from step {int(resumed.step)} in {directory}", file=sys.stderr)
        state = resumed
    step = make_finetune_step(config, optimizer, options, frozen=frozen, full=args.full, seed=args.seed)
    peak = args.learning_rate or (1e-5 if args.lora is None else 2e-4)
    state, curve = train(
        step, state, source, steps=args.steps, mesh=mesh, directory=directory, save_every=args.save_every,
        rate=lambda n: training.warmup_cosine(n, args.steps, peak=peak, warmup=args.warmup, floor=args.final_rate),
    )  # fmt: skip
    counted = jax.local_devices()[0].memory_stats() or {}  # None on a CPU
    if "peak_bytes_in_use" in counted:
        print(f"most memory in use on a device: {counted['peak_bytes_in_use'] / 2**30:.2f} GiB", file=sys.stderr)
    if frozen is None:
        dtype = jnp.dtype(config.dtype)
        params = unflatten({path: leaf.astype(dtype) for path, leaf in flatten(state.trained).items()})
    else:
        # On the host: of a model that just fits, the device has no room for a second copy.
        whole = lora.merged(frozen, state.trained, alpha=options.lora_alpha)
        params = unflatten({path: np.asarray(leaf) for path, leaf in whole})
    provenance = {**found.provenance, "finetuned": {"from": str(args.checkpoint), "command": " ".join(sys.argv[1:])}}
    save_checkpoint(
        args.output, config, params, tokenizer_dir=found.tokenizer_dir, provenance=provenance, force=args.force
    )
    if args.curve and curve:
        training.plot_curve(curve, args.curve)


def _same_settings(directory: Path, settings: dict[str, Any], resumed: bool) -> None:
    """Keep with a run's states what it depends on. Raises GenerationError for a state of another run, or if unknown."""
    path = directory / "settings.json"
    text = json.dumps(settings, indent=1) + "\n"
    if resumed and path.is_file():
        try:
            differing = cli_arguments.differing(json.loads(text), json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, AttributeError) as error:  # no JSON or no UTF-8; no object
            raise GenerationError(
                f"{path} is damaged ({error}), and it says which run the states beside it are of; remove {directory} "
                "to begin anew, or that file alone to go on, if the flags and the data are as they were"
            ) from error
        if differing:
            raise GenerationError(
                f"{directory} is of a run with another {', '.join(differing)}; give another output, or remove it"
            )
    directory.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as out:
        out.write(text)


def _lengths(given: str, block: int, most: int) -> list[int]:
    """Of `--length`. Raises GenerationError for what is no number or no length of whole blocks within the context."""
    found = []
    for part in given.split(","):
        length = int(part) if part.strip().isdecimal() else 0
        if length < 1 or length % block or length > most:
            raise GenerationError(
                f"--length is {given}, but must be a multiple of the block length {block} and at most the model's "
                f"context of {most}, or several such with commas between"
            )
        found.append(length)
    return found


def _copies(args: argparse.Namespace, length: int, block: int) -> int:
    return args.copies or max(1, length // block // 4)


def _source(
    args: argparse.Namespace, config: ModelConfig, tokenizer: Any, lengths: Sequence[int], batches: Sequence[int]
) -> Source:
    contract = config.diffusion
    end = contract.stop_token_ids[0] if contract.stop_token_ids else contract.pad_token_id
    if end is None:
        raise GenerationError("the model has neither a stop token nor a padding token to end its answers with")

    @functools.lru_cache(1 << 17 if args.data is None else 0)  # the haystack's sentences come again and again
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    haystack = None
    if args.haystack is not None:
        haystack = tasks.Haystack(tasks.read_text(args.haystack))

    def of(length: int, batch: int) -> Source:
        copies, block = _copies(args, length, contract.block_length), contract.block_length
        if args.data is not None:
            return TextRows(
                args.data, length=length, batch=batch, copies=copies, encode=encode, block=block, end=end,
                seed=args.seed,
            )  # fmt: skip
        names = list(tasks.TASKS) if args.tasks == "all" else args.tasks.split(",")
        return TaskRows(
            names, length=length, batch=batch, copies=copies, encode=encode, block=block, end=end, seed=args.seed,
            haystack=haystack,
        )  # fmt: skip

    return Turns([of(*each) for each in zip(lengths, batches, strict=True)])


if __name__ == "__main__":
    sys.exit(main())
