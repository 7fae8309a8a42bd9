"""What a selection leaves out, as one more summand of each query's attention (ours).

The later steps of a MAGE block attend to few entries of the prefix, and softmax over those alone overstates them: on
the reference model at 5 % they hold half of the attention. The other half is spread thinly over thousands of entries.
No small set replaces it, but it hardly changes from step to step. Now the selecting step is exact: after it one knows
each query's attention over everything, `(out, lse)`, and, asking the same query again, over its selection and block. By
log-sum-exp arithmetic the two give the attention over the rest, `(out, lse)` again, without reading an entry of it.
Later steps join this to what they attend to, weighted by its mass: exact if the query is still the same, and near it as
long as its input is. A position revealed since has another query, and does without.

Precedent: SparQ attention (Ribar et al., arXiv 2312.04985) gives the entries it leaves out the mean of all values.
Measured beside this on the reference model, see docs/accuracy.md.

Shape letters: L layers, B batch, M block length, H query heads, D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from herald_jax.config import ModelConfig


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Rest:
    """Per layer and query of the block: the attention over what was not selected.

    Attributes:
      inputs: i32[B, M], what the block's forward was given when it selected.
      queries: `[L, B, M, H, D]`, its queries. Rows of layers that select nothing hold zeros, here and below.
      out, lse: `[L, B, M, H, D]` of the model's dtype and f32[L, B, M, H]. From a layer's selection to the end of the
        selecting forward: its exact attention. Afterwards: that over the rest, with lse -inf where there is none.
    """

    inputs: jax.Array
    queries: jax.Array
    out: jax.Array
    lse: jax.Array

    @classmethod
    def empty(cls, config: ModelConfig, batch: int) -> Rest:
        """Nothing was left out."""
        block = config.diffusion.block_length
        shape = (config.num_layers, batch, block, config.num_heads, config.head_dim)
        # Two arrays, not one twice: both are donated.
        queries, out = jnp.zeros(shape, jnp.dtype(config.dtype)), jnp.zeros(shape, jnp.dtype(config.dtype))
        return cls(jnp.full((batch, block), -1, jnp.int32), queries, out, jnp.full(shape[:-1], -jnp.inf, jnp.float32))

    @classmethod
    def specs(cls) -> Rest:
        """How the arrays are split over a mesh."""
        wide = P(None, "data", None, "model", None)
        return cls(P("data", None), wide, wide, P(None, "data", None, "model"))  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        return self.queries.nbytes + self.out.nbytes + self.lse.nbytes

    def noted(self, layer: Any, queries: jax.Array, out: jax.Array, lse: jax.Array) -> Rest:
        """With a selecting layer's queries and exact attention, `[B, M, H, D]` and lse f32[B, M, H]."""
        return dataclasses.replace(
            self,
            queries=self.queries.at[layer].set(queries),
            out=self.out.at[layer].set(out),
            lse=self.lse.at[layer].set(lse),
        )

    def without(self, out: jax.Array, lse: jax.Array, everything: jax.Array) -> Rest:
        """Take from the exact attention what the queries find in the selection and the block, `(out, lse)` like ours.

        `everything` bool[L, B]: where the selection is the whole prefix; what is left there is rounding, and goes.
        """
        # exact = (1 - share) * out + share * rest
        share = -jnp.expm1(lse - self.lse)
        # Below the rounding of `out`, whose error the division by the share multiplies.
        some = (share >= 2 * jnp.finfo(out.dtype).eps) & ~everything[:, :, None, None]
        share = jnp.where(some, share, 1.0)
        exact, part = self.out.astype(jnp.float32), out.astype(jnp.float32)
        rest = exact + (exact - part) * ((1 - share) / share)[..., None]
        return dataclasses.replace(
            self,
            out=jnp.where(some[..., None], rest, 0.0).astype(out.dtype),
            lse=jnp.where(some, self.lse + jnp.log(share), -jnp.inf),
        )

    def joined(self, layer: Any, out: jax.Array, lse: jax.Array, same: jax.Array) -> jax.Array:
        """A later step's attention `out` `[B, M, H, D]` with lse f32[B, M, H], and the rest of its `same` queries.

        `same` bool[B, M], from `unchanged`.
        """
        rest = jnp.where(same[:, :, None], self.lse[layer], -jnp.inf)
        share = jnp.where(rest > -jnp.inf, jax.nn.sigmoid(rest - lse), 0.0)[..., None]
        out32 = out.astype(jnp.float32)
        return (out32 + share * (self.out[layer].astype(jnp.float32) - out32)).astype(out.dtype)
