"""From prompts to tokens: `generate`, and `stream`, which yields each finished block.

This module is the host side of the block loop: it has the request checked (`request.py`), sizes the cache, runs prefill
and the jitted loop (`block_loop.run_blocks`), and turns buffers into lists and text.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from herald_jax import sharding
from herald_jax.block_loop import first_canvas, run_blocks
from herald_jax.cache import DeviceKV
from herald_jax.config import GenerateConfig
from herald_jax.denoise import Sampling
from herald_jax.errors import GenerationError
from herald_jax.herald import Begun, Pipeline
from herald_jax.loading import Model
from herald_jax.loop_state import LoopOptions, Rows
from herald_jax.mage import MageKV
from herald_jax.plans import Dense, Herald, Mage, Plan
from herald_jax.pooled import PooledKV
from herald_jax.prefill import chunk_length, prefill
from herald_jax.request import Prompt, check_request, encode_prompts
from herald_jax.stats import Stats, Stopwatch
from herald_jax.text import StreamDecoder


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """What a batch produced.

    Attributes:
      tokens: new ids of each row, the stop token included.
      texts: their decoded form without special tokens; None for a model without tokenizer.
      errors: row to one sentence, for rows that ended early because the model produced NaN; their tokens stop there.
      stats: counts and times.
    """

    tokens: list[list[int]]
    texts: list[str] | None
    errors: dict[int, str]
    stats: Stats


@dataclasses.dataclass(frozen=True)
class BlockEvent:
    """A finished block of one row.

    Attributes:
      row: index of the prompt.
      index: how many blocks of this row were finished before.
      tokens: the new ids (prompt remainder excluded, cut at the stop token or the limit).
      text: what they add to the row's text; "" while a character is incomplete, None without tokenizer.
      done: whether the row ended with this block.
      error: a sentence when it ended because the model produced NaN.
    """

    row: int
    index: int
    tokens: list[int]
    text: str | None
    done: bool
    error: str | None = None


class SharedPrefill:
    """The prefilled cache of one batch, for several calls of `generate` with other plans: the first call fills it, and
    each decodes in a copy. Calls may come from several threads. HERALD's cache is another, which is not shared.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: tuple[np.ndarray, np.ndarray] | None = None
        self._made: tuple[DeviceKV, jax.Array] | None = None

    def copy(
        self, tokens: np.ndarray, lengths: np.ndarray, fill: Callable[[], tuple[DeviceKV, jax.Array]]
    ) -> tuple[DeviceKV, jax.Array]:
        """A copy of what `fill` made of the first `lengths` i32[B] of `tokens` i32[B, N].

        Raises GenerationError when that was another batch.
        """
        with self._lock:
            if self._of is None or self._made is None:
                self._of, self._made = (tokens, lengths), fill()
            if not all(map(np.array_equal, self._of, (tokens, lengths))):
                raise GenerationError("a shared prefill is for one batch of prompts, but these are others")
            return jax.tree.map(jnp.copy, self._made)


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    config: GenerateConfig | None = None,
    plan: Plan | None = None,
    *,
    keys: jax.Array | None = None,
    implementation: str | None = None,
    shared: SharedPrefill | None = None,
) -> GenerateResult:
    """Continue every prompt of a batch.

    Args:
      model: from `herald_jax.load`.
      prompts: texts (encoded as they are; apply the chat template with `model.tokenizer.chat`) or lists of ids.
      config: see `GenerateConfig`.
      plan: `Dense()`, `Mage(...)` or `Herald(...)`.
      keys: typed PRNG keys, one per row; None derives them from `config.seed` and the row's index.
      implementation: of attention: None, "xla" or "mosaic_gpu" (`pallas_kernels.block_attention`).
      shared: a `SharedPrefill` for all calls with these prompts, to prefill them once.

    Returns:
      `GenerateResult`. A row's tokens depend on its prompt, its key and the configuration alone, not on its neighbours.

    Raises:
      GenerationError: an empty prompt, ids outside the vocabulary, a prompt that leaves no room in the model's context,
        or an option the model's family does not have.
    """
    with _Run(model, prompts, config, plan, keys, implementation, shared) as run:
        run.advance(pause=False)
        return run.result()


def stream(
    model: Model,
    prompts: Sequence[Prompt],
    config: GenerateConfig | None = None,
    plan: Plan | None = None,
    *,
    keys: jax.Array | None = None,
    implementation: str | None = None,
) -> Iterator[BlockEvent | Stats]:
    """As `generate`, yielding a `BlockEvent` for every block as soon as it is finished, and the `Stats` at the end.

    The request is checked and prefilled when the first event is asked for. Closing the iterator stops the work.
    """
    with _Run(model, prompts, config, plan, keys, implementation) as run:
        yield from run.events()
        while not run.finished:
            run.advance(pause=True)
            yield from run.events()
        yield run.stats()


def capacity_for(needed: int) -> int:
    """Slots to allocate for `needed`: rounded up in steps of an eighth to a quarter, so that shapes repeat."""
    grain = max(128, 1 << max(needed.bit_length() - 3, 0))
    return -(-needed // grain) * grain


class _Run:
    """One batch on its way from prompts to tokens."""

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Prompt],
        config: GenerateConfig | None,
        plan: Plan | None,
        keys: jax.Array | None,
        implementation: str | None,
        shared: SharedPrefill | None = None,
    ):
        config = GenerateConfig() if config is None else config
        plan = Dense() if plan is None else plan
        self._prefilling, self._decoding = Stopwatch(), Stopwatch()
        self._pipeline: Pipeline | None = None
        self._begun: Begun | None = None
        self.model, self.config, self._shared = model, config, shared
        contract = model.config.diffusion
        block = contract.block_length
        ids = encode_prompts(model, prompts)
        check_request(model.config, config, plan, ids)
        self.count = len(ids)
        if keys is not None:
            _check_keys(keys, self.count)

        # Rows that only fill a data-parallel batch are done from the start.
        data = 1 if model.mesh is None else model.mesh.shape["data"]
        batch = -(-self.count // data) * data
        self.prompt_length = np.array([len(row) for row in ids] + [1] * (batch - self.count), np.int32)
        limit = self.prompt_length + config.max_new_tokens
        whole = self.prompt_length // block * block
        whole[self.count :] = 0
        longest = int(whole.max())
        chunk = chunk_length(longest, config.prefill_chunk, block) if longest else block
        end = -(-max(int(limit.max()), config.room) // block) * block + block
        capacity = capacity_for(max(end, -(-longest // chunk) * chunk))
        tokens = np.zeros((batch, capacity), np.int32)
        for row, prompt in enumerate(ids):
            tokens[row, : len(prompt)] = prompt

        stops = contract.stop_token_ids if config.stop_token_ids is None else config.stop_token_ids
        self._stops = np.array((-1,) if config.ignore_stop or not stops else stops, np.int32)
        self._sampling = Sampling.of(config.temperature, config.top_k, config.top_p)
        self._options = LoopOptions(model.config, model.mesh, config.block_cache, implementation, plan)

        with self._prefilling:
            place = self._place
            kv, last_hidden = self._prefill(tokens, whole, capacity, chunk, end - block)
            self.kv_bytes = kv.nbytes
            self._rows: Rows = first_canvas(
                model.params,
                kv,
                last_hidden,
                place(tokens),
                place(whole),
                place(self.prompt_length),
                place(limit),
                place(np.arange(batch) >= self.count),
                place(_row_keys(config.seed, keys, batch)),
                self._stops,
                self._sampling,
                options=self._options,
            )
            self._fetch()
        self._emitted = self.prompt_length[: self.count].copy()
        self._indices = [0] * self.count
        self._reported = np.zeros(self.count, bool)
        self._decoders = [StreamDecoder(model.tokenizer) for _ in ids] if model.tokenizer_dir else None

    def _prefill(
        self, tokens: np.ndarray, whole: np.ndarray, capacity: int, chunk: int, longest: int
    ) -> tuple[DeviceKV | MageKV | PooledKV, jax.Array]:
        """The plan's cache holding every row's whole blocks, and the last hidden states `[B, E]`."""
        model, options, plan = self.model, self._options, self._options.plan
        if isinstance(plan, Herald):
            self._pipeline = Pipeline(model.params, options)
            slots = whole[:, None] + np.arange(model.config.diffusion.block_length)[None, :]
            known = slots < self.prompt_length[:, None]
            return self._pipeline.prefill(
                tokens, whole, known, capacity=capacity, longest=longest, chunk=chunk
            )  # fmt: skip

        def fill() -> tuple[DeviceKV, jax.Array]:
            cache = DeviceKV.empty(model.config, tokens.shape[0], capacity, model.mesh)
            return prefill(
                model.params, cache, tokens, whole, config=model.config, chunk=chunk, mesh=model.mesh,
                implementation=options.implementation,
            )  # fmt: skip

        cache, last_hidden = fill() if self._shared is None else self._shared.copy(tokens, whole, fill)
        if isinstance(plan, Mage):
            return MageKV.around(cache, plan, model.config, longest, model.mesh), last_hidden
        return cache, last_hidden

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pipeline is not None:
            self._pipeline.close()

    def _place(self, value: Any) -> Any:
        sharded = sharding.batch_sharding(self.model.mesh, value.ndim)
        return value if sharded is None else jax.device_put(value, sharded)

    def _fetch(self) -> None:
        self._host = _to_host(self._seen())

    def _seen(self) -> dict[str, jax.Array]:
        """What the host looks at."""
        rows = self._rows
        return {
            "tokens": rows.tokens,
            "length": rows.length,
            "limit": rows.limit,
            "ready": rows.ready,
            "done": rows.done,
            "failed": rows.failed,
            "forwards": rows.forwards,
            "commits": rows.commits,
            "blocks": rows.blocks,
            "batch_forwards": rows.batch_forwards,
            "sparse_blocks": rows.sparse_blocks,
            "exact_forwards": rows.exact_forwards,
            "edited": rows.edited,
        } | self._measured()

    def _measured(self) -> dict[str, jax.Array]:
        cache = self._rows.cache
        return {"measured": cache.measured} if isinstance(cache, MageKV) and cache.measured is not None else {}

    @property
    def finished(self) -> bool:
        return bool(self._host["done"].all())

    def advance(self, *, pause: bool) -> None:
        """Run the loop until a block of some row is finished (`pause`), or to the end."""
        how = (self.config.policy, self._sampling, self._stops)
        with self._decoding:
            if self._pipeline is None:
                self._rows = run_blocks(self.model.params, self._rows, *how, np.bool_(pause), options=self._options)
                self._fetch()
                return
            while not self.finished:
                self._next_block(self._pipeline, how)
                if pause:
                    break

    def _next_block(self, pipeline: Pipeline, how: Any) -> None:
        """Finish a block, begin the one after it, and read the first: the device does not wait for the reading."""
        last = self._last_block(0)
        begun = self._begun or pipeline.begin(self._rows, *how, last=last)
        self._rows, self._begun = pipeline.rest(begun, last=last), None
        seen = self._seen()
        if not last:
            seen = _copies(seen)  # the next block takes the rows over
            self._begun = pipeline.begin(self._rows, *how, last=self._last_block(1))
            self._rows = self._begun.rows
        self._host = _to_host(seen)

    def _last_block(self, ahead: int) -> bool:
        """Whether the block `ahead` blocks after the first that the host has not seen ends every row, by their limits.

        Each block takes every row that is not done a block further.
        """
        block = self.model.config.diffusion.block_length
        end = self._host["length"] + (1 + ahead) * block
        return bool((self._host["done"] | (end >= self._host["limit"])).all())

    def _new_tokens(self, row: int) -> list[int]:
        new = self._host["tokens"][row, self.prompt_length[row] : self._host["ready"][row]].tolist()
        stop = next((i for i, token in enumerate(new) if token in self._stops), len(new) - 1)
        return new[: stop + 1]

    def _error(self, row: int) -> str | None:
        if not self._host["failed"][row]:
            return None
        return f"row {row} ended early: the model produced NaN after {len(self._new_tokens(row))} new tokens"

    def events(self) -> Iterator[BlockEvent]:
        """Blocks finished since the last call."""
        for row in range(self.count):
            end = int(self.prompt_length[row]) + len(self._new_tokens(row))
            done = bool(self._host["done"][row])
            if self._reported[row] or (end == self._emitted[row] and not done):
                continue
            new = self._host["tokens"][row, self._emitted[row] : end].tolist()
            text = None
            if self._decoders is not None:
                text = self._decoders[row].push(new) + (self._decoders[row].flush() if done else "")
            yield BlockEvent(row, self._indices[row], new, text, done, self._error(row))
            self._emitted[row], self._reported[row] = end, done
            self._indices[row] += 1

    def result(self) -> GenerateResult:
        tokens = [self._new_tokens(row) for row in range(self.count)]
        texts = [self.model.tokenizer.decode(row) for row in tokens] if self.model.tokenizer_dir else None
        errors = {row: error for row in range(self.count) if (error := self._error(row)) is not None}
        return GenerateResult(tokens, texts, errors, self.stats())

    def stats(self) -> Stats:
        host = {name: value[: self.count] if value.ndim else value for name, value in self._host.items()}
        forwards, commits = int(host["forwards"].sum()), int(host["commits"].sum())
        measured = host["measured"].sum(axis=0) if "measured" in host else np.zeros(3)
        return Stats(
            rows=self.count,
            prompt_tokens=int(self.prompt_length[: self.count].sum()),
            new_tokens=sum(len(self._new_tokens(row)) for row in range(self.count)),
            batch_forwards=int(host["batch_forwards"]),
            forwards=forwards,
            denoise_steps=forwards - commits,
            commits=commits,
            blocks=int(host["blocks"].sum()),
            sparse_blocks=int(host["sparse_blocks"].sum()),
            exact_forwards=int(host["exact_forwards"]),
            recall_sum=float(measured[0]),
            mass_sum=float(measured[1]),
            measured=int(measured[2]),
            prefill_seconds=self._prefilling.seconds,
            decode_seconds=self._decoding.seconds,
            compile_seconds=self._prefilling.compile_seconds + self._decoding.compile_seconds,
            kv_bytes=self.kv_bytes,
            edited_tokens=int(host["edited"].sum()),
            offload=None if self._pipeline is None else self._pipeline.settle(),
        )


def _check_keys(keys: Any, count: int) -> None:
    array = isinstance(keys, (jax.Array, np.ndarray))
    if not array or keys.shape != (count,) or not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        given = f"{keys.dtype}{list(keys.shape)}" if array else repr(keys)
        raise GenerationError(f"keys are {given}, but one typed key per prompt, [{count}], was expected")


def _row_keys(seed: int, keys: jax.Array | None, batch: int) -> jax.Array:
    derived = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(np.arange(batch))
    return derived if keys is None else derived.at[: keys.shape[0]].set(keys)


@jax.jit
def _copies(values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.copy, values)


def _to_host(values: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    if all(value.is_fully_addressable for value in values.values()):
        return {name: np.asarray(value) for name, value in jax.device_get(values).items()}
    return multihost_utils.process_allgather(values, tiled=True)
