"""A decoder whose blocks are the stages of a pipeline, under either schedule.

Entry points: `PipelinedDecoder`, `table_bytes`. Which layers are a stage's is `staging`'s to say; what a stage computes
is the decoder's own loop over its share of the turns.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dew.arrays import Array, Float, Int
from dew.kernels.dropout import Dropout
from dew.nn.backbones.banks import Segment, bank_name, logical_names
from dew.nn.backbones.loops import by_layer, rotary_of, whole_surroundings
from dew.nn.backbones.staging import staged_segment
from dew.nn.block import RESIDUAL_NAMES
from dew.nn.router import Routing, scaled_gradients
from dew.nn.sharding import constrain, constrain_weights
from dew.parallel.gpipe import through_stages
from dew.parallel.one_f_one_b import StagedModel, scheduled_loss
from dew.parallel.schedules import SCHEDULES
from dew.parallel.stages import Pipeline
from dew.parallel.table_copies import copied_token_loss, copies_of, look_up, pinned_copies


def table_bytes(decoder: Any) -> int:
    """Count what 1F1B holds of token tables on each device from the first tick to the last.

    A copy of the token table, and of an untied head, in the dtype that they are stored in, and the sum of its gradients
    in float32; whole, whatever the mesh.

    Args:
        decoder: The `CausalTransformer`.
    """
    tables = 1 if decoder.tie_embeddings else 2
    itemsize = jnp.dtype(decoder.param_dtype).itemsize
    return tables * decoder.vocab_size * decoder.features * (itemsize + 4)


@dataclasses.dataclass(frozen=True)
class PipelinedDecoder:
    """A decoder on a mesh with stages, inside a trace.

    Attributes:
        decoder: The `CausalTransformer`, bound to its variables.
        pipeline: The stages and microbatches.
        dropout: What training drops of the whole batch; None where nothing is.
    """

    decoder: Any
    pipeline: Pipeline
    dropout: Dropout | None = None

    def hidden_states(
        self, tokens: Int[Array, "B T"], positions: Any, segment_ids: Any, counted: Any
    ) -> tuple[Float[Array, "B T D"], tuple[Routing, ...]]:
        """Run the stages forward; differentiated, they run backward after all microbatches have left.

        Args:
            tokens: Token ids.
            positions: Position of each token in its document; None counts from 0.
            segment_ids: Document number of each token, 0 for padding; None means one document a row.
            counted: Weight of each token in the statistics of the routers; None where there are none.

        Returns:
            The output of the last norm, and the statistics of each layer with experts.
        """
        given = self._given({"positions": positions, "segment_ids": segment_ids, "weights": counted})
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        x = self.decoder.embedded(tokens, given.get("positions", places), self.dropout)
        x, said = through_stages(self.pipeline, self._stage(places), self._stage_weights(), x, given)
        return self.decoder.normed(x), self._routing(said)

    def token_loss(
        self, scored: dict[str, Array], documents: dict[str, Array | None], router_loss: Callable[..., Array] | None
    ) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""], tuple[Routing, ...]]:
        """Sum the weighted cross entropies of a batch, its gradients computed in the order of 1F1B.

        Args:
            scored: The arrays `tokens`, `targets` and `weights`, each [B, T].
            documents: The arrays `positions` and `segment_ids`, or None.
            router_loss: What the statistics of the routers add to the sum, a linear function; None adds nothing.

        Returns:
            As `CausalTransformer.token_loss`.
        """
        given = self._given({**scored, **documents})
        rows, length = scored["tokens"].shape
        banked = {bank_name(run) for run in self._segment.runs}
        outer = {name: self.decoder.stored(name) for name in self.decoder.parts() if name not in banked}
        model = self._model((rows // self.pipeline.microbatches, length), router_loss)
        timetable = SCHEDULES[self.decoder.schedule].timetable(self.pipeline.stages, self.pipeline.microbatches)
        total, ((correct, mass), said) = scheduled_loss(
            self.pipeline, model, timetable, outer, self._stage_weights(), given
        )
        return total, correct, mass, self._routing(said)

    def _given(self, arrays: dict[str, Array | None]) -> dict[str, Array]:
        """Collect what is cut into microbatches: the arrays that there are, and the rows that masks are drawn for."""
        rows = None if self.dropout is None else self.dropout.rows
        return {name: value for name, value in (arrays | {"rows": rows}).items() if value is not None}

    def _dropout_of(self, given: Any) -> Dropout | None:
        """Give the dropout of a microbatch."""
        return None if self.dropout is None else self.dropout.replace(rows=given["rows"])

    @property
    def _segment(self) -> Segment:
        """The loop that the stages share out."""
        stored = {"scan_layers": self.decoder.scan_layers, "bank_layers": self.decoder.bank_layers}
        return staged_segment(self.decoder.layers, self.pipeline.stages, **stored)

    def _routing(self, said: list[Any]) -> tuple[Routing, ...]:
        """Give each layer what its router said, from what the stages say of their layers."""
        segment = self._segment
        routing: dict[int, Routing] = {}
        lead = 1 if segment.repeats == self.pipeline.stages else 2
        for run, each in zip(segment.runs, said, strict=True):
            layers = jax.tree.map(lambda leaf: leaf.reshape(segment.repeats, *leaf.shape[lead:]), each)
            routing |= by_layer(run, layers, is_stacked=True)
        return tuple(routing[index] for index in sorted(routing))

    def _stage_weights(self) -> list[Any]:
        """View the banks as the stages that hold them."""
        return self.pipeline.by_stage(self.decoder.stored_runs(self._segment))

    def _stage(self, counted: Int[Array, "1 T"]) -> Callable[..., Any]:
        """Build the function of one stage: (its weights, x, what its microbatch says of the tokens) -> (x, sums)."""
        decoder, segment = self.decoder, self._segment
        share = dataclasses.replace(segment, repeats=segment.repeats // self.pipeline.stages)
        numbers = [np.reshape(run, (self.pipeline.stages, share.repeats)) for run in segment.runs]

        def stage(weights: Any, x: Array, given: Any) -> tuple[Array, Any]:
            dropout = self._dropout_of(given)
            around = whole_surroundings(x.shape[1], given.get("segment_ids"), given.get("weights"), dropout)
            own = [None if dropout is None else jnp.asarray(n)[self.pipeline.stage_number()] for n in numbers]
            if share.repeats == 1:
                weights, own = jax.tree.map(lambda leaf: leaf[0], (weights, own))
            tables = rotary_of(decoder.layers, given.get("positions", counted))
            return decoder.run_segment(share, weights, x, around, tables, own)

        return stage

    def _model(self, shape: tuple[int, int], router_loss: Callable[..., Array] | None) -> StagedModel:
        """Give the schedule the decoder's pure functions, for microbatches of a shape [rows, T]."""
        decoder, pipeline, mesh = self.decoder, self.pipeline, self.pipeline.mesh
        parts, head = decoder.parts(), "embed_tokens" if decoder.tie_embeddings else "lm_head"
        counted = jnp.arange(shape[1], dtype=jnp.int32)[None]

        def prepare(outer):
            tables = {name: copies_of(mesh, outer[name]["embedding"], shape) for name in ("embed_tokens", head)}
            return outer | {name: {"embedding": copies} for name, copies in tables.items()}

        def embed(outer, given):
            rows = look_up(mesh, outer["embed_tokens"]["embedding"], given["tokens"]).astype(decoder.dtype)
            positions, dropout = given.get("positions", counted), self._dropout_of(given)
            return constrain(decoder.positioned(rows, positions, dropout, outer), RESIDUAL_NAMES)

        def score(outer, x, given):
            hidden, scored = decoder.normed(x, outer), (given["targets"], given["weights"])
            factors = (decoder.logit_softcap, decoder.logit_scale)
            total, *further = copied_token_loss(mesh, hidden, outer[head]["embedding"], *scored, *factors)
            return total, tuple(further)

        def pin(name, own):
            if name in ("embed_tokens", head):
                return {"embedding": pinned_copies(mesh, own["embedding"], shape)}
            return constrain_weights(own, logical_names(parts[name]))

        def pinned(outer, weights):
            outer = {name: pin(name, own) for name, own in outer.items()}
            names = [logical_names(decoder.layer_of(run)) for run in self._segment.runs]
            return outer, [
                pipeline.map(jax.vmap(functools.partial(constrain_weights, names=of_run)))(own)
                for own, of_run in zip(weights, names, strict=True)
            ]

        def extra(said):
            routing = self._routing(said)
            return router_loss(routing) if routing and router_loss is not None else 0.0

        return StagedModel(prepare, embed, self._stage(counted), extra, score, pinned, scaled_gradients)
