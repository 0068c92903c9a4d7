"""A decoder-only transformer assembled from layer specs, its like layers stored in banks.

Entry points: `LayerSpec`, `CausalTransformer`. A bank is one `[L, ...]` array per weight of layers that are run by one
loop (`dew.nn.backbones.banks`); a layer of its own is stored as itself. Initial values depend on the key and a layer's
own name, not on the banks.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import unfreeze

from dew.arrays import Array, Float, Int
from dew.kernels.attention import Implementation
from dew.kernels.attention_choice import check_implementation
from dew.kernels.dropout import Dropout, MissingKeyError, checked_rate
from dew.kernels.quantized_product import Quantization, checked_quantization, quantized
from dew.nn.backbones.banks import Segment, bank_name, initial_weights, logical_names, segments
from dew.nn.backbones.loops import (
    by_layer,
    layer_numbers,
    rotary_of,
    run_cached_segment,
    run_segment,
    whole_surroundings,
)
from dew.nn.backbones.pipelined import PipelinedDecoder, table_bytes
from dew.nn.backbones.prediction import further_hidden_states, prediction_parts
from dew.nn.backbones.staging import (
    check_prediction,
    checked_schedule,
    refuse_float16,
    refuse_unscheduled,
    staged_segment,
)
from dew.nn.block import RESIDUAL_NAMES, DecoderLayer, LayerSpec, Surroundings
from dew.nn.cache import Cache, LayerShape, empty_cache
from dew.nn.embed import TABLE_NAMES, Embedding, EmbeddingSpec, HeadSpec, project, scaled_rows
from dew.nn.latent_attention import attention_form
from dew.nn.mamba2 import WIDE_WEIGHTS
from dew.nn.masks import cached_visibility
from dew.nn.moe import ExpertsSpec
from dew.nn.norm import Norm, NormSpec
from dew.nn.prediction import PredictionSpec
from dew.nn.remat import REMAT_POLICIES, checked_remat, checkpointed
from dew.nn.router import RouterTraining, Routing, is_balance_bias, router_loss
from dew.nn.sharding import constrain, gather_weights, unboxed
from dew.parallel.choice import SequenceImplementation, checked_sequence_implementation
from dew.parallel.schedules import SCHEDULES, ScheduleName
from dew.parallel.stages import current_pipeline
from dew.placement.stacks import Bank, StackView

__all__ = ["DROPOUT_RATES", "REMAT_POLICIES", "CausalTransformer", "DecoderLayer", "LayerSpec"]

DROPOUT_RATES = ("dropout_rate", "embedding_dropout_rate", "attention_dropout_rate")
"""Fields of a decoder that say what training drops."""


class CausalTransformer(nn.Module):
    """A causal language model.

    Attributes:
        vocab_size: Rows of the token table.
        features: Width of the residual stream.
        layers: The blocks, first to last.
        norm: Norm after the last block.
        embedding: What happens to looked-up rows: a factor, learned positions.
        head: What happens to the logits: a factor, a bound.
        tie_embeddings: Whether the token table also scores the vocabulary.
        max_length: Longest context in tokens.
        dtype: Compute dtype.
        param_dtype: Storage dtype of the weights.
        remat: What the backward pass recomputes: None nothing, "full" everything but the blocks' inputs.
        scan_layers: Whether equal layers, in a row or in a repeating pattern, are stored in banks and scanned.
        bank_layers: Most layers a bank may hold; None means no bound.
        attention_impl: Attention kernel of whole sequences, see `dew.kernels.attention_choice.KERNELS`; "auto" takes
            the first that can run the call, as every call with a cache does.
        sequence_impl: How attention is exchanged on a mesh that splits positions: "auto", or "all_to_all", "gather",
            "ring" or "banded" for every layer.
        quantization: 8-bit type in which the blocks multiply activations and weights, "int8" or "fp8", for speed where
            the hardware has it; results change. None computes in `dtype`. Weights, gradients, embeddings, heads,
            routers and experts stay as they are.
        schedule: Order of the microbatches where the mesh has pipeline stages: "gpipe" or "1f1b".
        router_training: What trains the routers beside the loss of the tokens.
        prediction: Layers that predict tokens after the next one, for training alone: logits and generation know
            nothing of them. None has none.
        dropout_rate: Share of what each mixer and each perceptron adds to the residual stream that training drops.
        embedding_dropout_rate: Share of the embeddings, positions included, that it drops.
        attention_dropout_rate: Share of the attention probabilities that it drops, in the layers that attend; the
            kernel "xla" alone does.
    """

    vocab_size: int
    features: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    embedding: EmbeddingSpec = EmbeddingSpec()
    head: HeadSpec = HeadSpec()
    tie_embeddings: bool = True
    max_length: int = 2048
    dtype: Any = "float32"
    param_dtype: Any = "float32"
    remat: str | None = None
    scan_layers: bool = True
    bank_layers: int | None = None
    attention_impl: Implementation = "auto"
    sequence_impl: SequenceImplementation = "auto"
    quantization: Quantization | None = None
    schedule: ScheduleName = "gpipe"
    router_training: RouterTraining = RouterTraining()
    prediction: PredictionSpec | None = None
    dropout_rate: float = 0.0
    embedding_dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0

    def __post_init__(self) -> None:
        checked_remat(self.remat)
        checked_quantization(self.quantization)
        checked_schedule(self.schedule)
        check_implementation("attention_impl", self.attention_impl)
        checked_sequence_implementation(self.sequence_impl)
        for name in DROPOUT_RATES:
            checked_rate(name, getattr(self, name))
        if self.attention_dropout_rate and not any(attention_form(layer.mixer) for layer in self.training_layers):
            raise ValueError(
                "no layer has attention probabilities to drop; dropout_rate drops what any mixer adds. Received: "
                f"attention_dropout_rate={self.attention_dropout_rate}"
            )
        if self.bank_layers is not None and self.bank_layers < 1:
            raise ValueError(f"bank_layers must be None or positive. Received: bank_layers={self.bank_layers}")
        if self.embedding.positions is not None and self.embedding.positions < self.max_length:
            raise ValueError(
                f"a context of {self.max_length} tokens needs as many learned positions. Received: "
                f"positions={self.embedding.positions}"
            )
        check_prediction(self.prediction is not None, self.schedule)
        self.router_training.check([spec.router for spec in (*self.expert_layers, *self.prediction_experts)])
        super().__post_init__()

    def setup(self) -> None:
        """Declare the weights of every part under its own name."""
        self.declared = True
        missing = [name for name in self.parts() if not self.has_variable("params", name)]
        if not missing:
            return
        key = self.make_rng("params") if self.has_rng("params") else None
        banks = {bank.name: bank.layers for bank in self.stack_view().banks}
        for name in missing:
            part = self.parts()[name]
            self.param(
                name, lambda _, part=part, name=name: initial_weights(part, key, name, banks.get(name)), unbox=False
            )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: Cache | None = None,
        train: bool = False,
    ) -> Any:
        """Score the next token at every position.

        Args:
            tokens: Token ids.
            positions: Position of each token in its document; None counts from 0 (from the cache's end with a cache).
            segment_ids: Document number of each token, 0 for padding; None means one document a row.
            cache: What the layers keep of the tokens already read; new tokens are appended to it.
            train: Whether this is a training step, which drops what the rates say and then needs a key "dropout". A
                pipeline schedule that scores in the middle of its backward passes trains through `token_loss` only.

        Returns:
            Logits [B, T, V] in float32; with a cache, the pair of logits and the next cache. Where the collection
            "losses" may change, what routers add to a mean loss is sown there, a mean over tokens that are no padding.
        """
        if cache is not None:
            hidden, cache = self.hidden_states(tokens, positions, segment_ids, cache, train)
            return project(hidden, self._head(), self.head), cache
        if self.trains_routers and self.is_mutable_collection("losses"):
            hidden = self._with_router_loss(tokens, positions, segment_ids, train)
        else:
            hidden = self.hidden_states(tokens, positions, segment_ids, None, train)
        return project(hidden, self._head(), self.head)

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: Cache | None = None,
        train: bool = False,
    ) -> Any:
        """Compute the output of the last norm; arguments as `__call__`'s.

        Returns:
            Hidden states [B, T, D] in the compute dtype; with a cache, the pair of hidden states and the next cache.

        Raises:
            ValueError: If a schedule that cannot train so is asked to, a pipeline's rows do not divide, or a training
                step with dropout has no key.
            LayoutRefused: If the layers do not divide into the stages of the mesh.
        """
        if cache is None:
            return self._whole(tokens, positions, segment_ids, None, train)[0]
        real = jnp.ones(tokens.shape, bool) if segment_ids is None else segment_ids > 0
        if positions is None:
            start = jnp.sum(cache.valid, axis=1, dtype=jnp.int32, keepdims=True)
            positions = jnp.maximum(start + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1, 0)
        x, cache = self.embedded(tokens, positions), cache.marked(real)
        visibility = cached_visibility(cache.index, tokens.shape[1], cache.valid)
        given = None if segment_ids is None else real
        around = Surroundings(visibility, real=given, is_token=given)
        x, cache = self._run_cached_layers(x, around, rotary_of(self.layers, positions), cache)
        return self.normed(x), cache

    def routed_hidden_states(
        self,
        tokens: Int[Array, "B T"],
        counted: Float[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        train: bool = False,
    ) -> tuple[Float[Array, "B T D"], tuple[Routing, ...]]:
        """Compute the output of the last norm and what the routers say.

        Args:
            tokens: Token ids.
            counted: Weight of each token in the statistics; padding and tokens without weight do not count.
            positions: As `__call__`.
            segment_ids: As `__call__`.
            train: Whether this is a training step.

        Returns:
            Hidden states, and the statistics of each layer with experts, first to last.
        """
        return self._whole(tokens, positions, segment_ids, counted, train)

    def further_hidden_states(
        self,
        hidden: Float[Array, "B T D"],
        further: Sequence[Mapping[str, Any]],
        positions: Int[Array, "B T"] | None = None,
        train: bool = False,
    ) -> tuple[tuple[Float[Array, "B T D"], ...], tuple[Routing, ...]]:
        """Run the layers of `prediction`; see `dew.nn.backbones.prediction.further_hidden_states`."""
        dropout = self._dropout(hidden.shape[0]) if train else None
        return further_hidden_states(self, hidden, further, positions, dropout)

    def _with_router_loss(self, tokens: Array, positions: Any, segment_ids: Any, train: bool) -> Float[Array, "B T D"]:
        """Compute the output of the last norm, and sow what the routers add to the loss."""
        counted = jnp.ones(tokens.shape) if segment_ids is None else jnp.asarray(segment_ids > 0, jnp.float32)
        hidden, routing = self._whole(tokens, positions, segment_ids, counted, train)
        if not self.is_initializing():
            mean = router_loss(routing, self.router_training) / jnp.maximum(jnp.sum(counted), 1.0)
            self.sow("losses", "router_loss", mean)
        return hidden

    def _whole(
        self, tokens: Array, positions: Any, segment_ids: Any, counted: Any, train: bool = False
    ) -> tuple[Array, Any]:
        """Run the model on whole sequences."""
        pipeline = None if self.is_initializing() else current_pipeline()
        dropout = self._dropout(tokens.shape[0]) if train else None
        if pipeline is not None:
            if train:
                refuse_unscheduled(self, pipeline.stages, "a call with train=True")
            return PipelinedDecoder(self, pipeline, dropout).hidden_states(tokens, positions, segment_ids, counted)
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] if positions is None else positions
        around = whole_surroundings(tokens.shape[1], segment_ids, counted, dropout)
        x = self.embedded(tokens, positions, dropout)
        x, routing = self._run_layers(x, around, rotary_of(self.layers, positions))
        return self.normed(x), routing

    def _dropout(self, rows: int) -> Dropout | None:
        """Draw the key of a training step's masks; None where nothing is dropped."""
        rates = {
            "embedding_rate": self.embedding_dropout_rate,
            "residual_rate": self.dropout_rate,
            "attention_rate": self.attention_dropout_rate,
        }
        if not any(rates.values()):
            return None
        if not self.has_rng("dropout"):
            raise MissingKeyError(
                "a training step with dropout needs a random key: pass rngs={'dropout': key} to apply, or set the "
                f"rates to 0. Received: {rates}"
            )
        return Dropout.of_batch(self.make_rng("dropout"), rows, **rates)

    @property
    def expert_layers(self) -> tuple[ExpertsSpec, ...]:
        """The experts of the layers that have them, first to last."""
        return tuple(layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsSpec))

    @property
    def training_layers(self) -> tuple[LayerSpec, ...]:
        """The blocks that a training step runs: `layers`, and those that predict further tokens."""
        further = self.prediction
        return self.layers if further is None else self.layers + (further.layer,) * further.depth

    @property
    def prediction_experts(self) -> tuple[ExpertsSpec, ...]:
        """The experts of the layers that predict further tokens, first to last."""
        further = self.training_layers[len(self.layers) :]
        return tuple(layer.mlp for layer in further if isinstance(layer.mlp, ExpertsSpec))

    @property
    def trains_routers(self) -> bool:
        """Whether something trains the routers beside the loss of the tokens."""
        return self.router_training != RouterTraining()

    def head_weight(self, variables: Any) -> Float[Array, "V D"]:
        """Give the matrix that scores the vocabulary, [V, D]: the token table, or the untied head.

        Args:
            variables: The model's variables, with its `params` collection.
        """
        name = "embed_tokens" if self.tie_embeddings else "lm_head"
        return unboxed(variables["params"][name]["embedding"])

    def logits(self, variables: Any, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Score every token of the vocabulary for given hidden states, in float32."""
        table = self.head_weight(variables).astype(self.dtype)
        return project(hidden, gather_weights(table, TABLE_NAMES), self.head)

    @property
    def logit_scale(self) -> float:
        """Factor on the products of hidden states and `head_weight`, for a loss that computes its own logits."""
        return self.head.scale

    @property
    def logit_softcap(self) -> float | None:
        """Bound of the logits after the factor; None leaves them."""
        return self.head.softcap

    def stack_view(self) -> StackView:
        """Say which layers are stored together."""
        return StackView(
            tuple(
                Bank(bank_name(run), tuple(f"layers_{index}" for index in run)) for run in self._runs() if len(run) > 1
            )
        )

    def init_cache(self, batch: int, length: int, dtype: Any = None) -> Cache:
        """Make an empty cache.

        Args:
            batch: Rows.
            length: Slots a row has: prompt and new tokens, padding included.
            dtype: Dtype of keys and values; None means the compute dtype.
        """
        kinds = tuple((kind, len(layers)) for kind, layers in self._cache_banks().items())
        return empty_cache(kinds, batch, length, self.dtype if dtype is None else dtype)

    def _cache_banks(self) -> dict[LayerShape, list[int]]:
        """Say which layers share a bank of the cache: those that keep the same.

        Longer than the banks of weights: writes into one bank for all layers XLA does in place, caches of one layer it
        would copy at every token.
        """
        banks: dict[LayerShape, list[int]] = collections.defaultdict(list)
        for index, spec in enumerate(self.layers):
            banks[spec.mixer.cache_shape].append(index)
        return dict(banks)

    def loops(self) -> tuple[Segment, ...]:
        """Group the layers into loops."""
        return segments(self.layers, self.scan_layers, self.bank_layers)

    def _runs(self) -> tuple[tuple[int, ...], ...]:
        """Group the layers into runs that are stored together."""
        return tuple(run for segment in self.loops() for run in segment.runs)

    def parts(self) -> dict[str, nn.Module]:
        """Name every part that is stored: tables, a block per run, norm, untied head, layers of `prediction`."""
        dtype = self.param_dtype
        parts: dict[str, nn.Module] = {"embed_tokens": Embedding(self.vocab_size, self.features, dtype, parent=None)}
        if self.embedding.positions is not None:
            parts["embed_positions"] = Embedding(self.embedding.positions, self.features, dtype, parent=None)
        for run in self._runs():
            parts[bank_name(run)] = self.layer_of(run)
        parts["norm"] = Norm(self.features, self.norm, dtype, parent=None)
        if not self.tie_embeddings:
            parts["lm_head"] = Embedding(self.vocab_size, self.features, dtype, parent=None)
        return parts | prediction_parts(self)

    def layer_of(self, run: tuple[int, ...]) -> DecoderLayer:
        kinds = self.attention_impl, self.sequence_impl
        return DecoderLayer(self.features, self.layers[run[0]], self.param_dtype, *kinds, parent=None)

    def stored(self, name: str) -> Any:
        """Give the stored weights of a part."""
        assert self.declared, "setup has declared the weights"
        return unboxed(unfreeze(self.get_variable("params", name)))

    def stored_runs(self, segment: Segment) -> list[Any]:
        """Give the stored weights of each run of a segment."""
        return [self.stored(bank_name(run)) for run in segment.runs]

    def ready(self, part: nn.Module, weights: Any) -> Any:
        """Cast weights to the compute dtype, but those that must stay wide, and gather them where they are used."""

        def cast(path: Any, weight: Array) -> Array:
            name = path[-1].key
            return weight if name in WIDE_WEIGHTS or is_balance_bias(name) else weight.astype(self.dtype)

        weights = jax.tree.map_with_path(cast, weights)
        return gather_weights(weights, logical_names(part))

    def _apply(self, name: str, *inputs: Any, outer: Any = None) -> Any:
        """Apply a part that is stored on its own, with given weights of such parts or the stored ones."""
        part, weights = self.parts()[name], self.stored(name) if outer is None else outer[name]
        return part.apply({"params": self.ready(part, weights)}, *inputs)

    def normed(self, x: Float[Array, "B T D"], outer: Any = None) -> Float[Array, "B T D"]:
        """Apply the last norm; its result is in the compute dtype whatever the residual stream is in."""
        return self._apply("norm", x, outer=outer).astype(self.dtype)

    def embedded(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], dropout: Dropout | None = None
    ) -> Float[Array, "B T D"]:
        """Look tokens up, and their positions where those are learned."""
        return self.positioned(self._apply("embed_tokens", tokens), positions, dropout)

    def looked_up(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Look tokens up, and scale their rows."""
        return scaled_rows(self._apply("embed_tokens", tokens), self.embedding)

    def positioned(
        self, rows: Array, positions: Array, dropout: Dropout | None, outer: Any = None
    ) -> Float[Array, "B T D"]:
        """Scale looked-up rows, add learned positions, and drop what training drops."""
        x = scaled_rows(rows, self.embedding)
        if any(layer.residual_in_float32 for layer in self.layers):
            x = x.astype(jnp.float32)
        if self.embedding.positions is not None:
            x = constrain(x + self._apply("embed_positions", positions, outer=outer), RESIDUAL_NAMES)
        return x if dropout is None else dropout.of_embeddings(x)

    def _head(self) -> Float[Array, "V D"]:
        name = "embed_tokens" if self.tie_embeddings else "lm_head"
        return self.ready(self.parts()[name], self.stored(name))["embedding"]

    def _block(self, run: tuple[int, ...], around: Surroundings, tables: dict) -> Any:
        """Build the function of a run's blocks, as `dew.nn.backbones.loops` describes it."""
        layer = self.layer_of(run)
        mixer = layer.spec.mixer
        rotary = tables.get((mixer.rotary, mixer.rotary_dim)) if mixer.rotary else None

        def block(x, weights, cache=None, number=None):
            dropout = around.dropout
            own = around if dropout is None else around.replace(dropout=dropout.of_layer(number))
            with quantized(self.quantization):
                return layer.apply({"params": self.ready(layer, weights)}, x, own, rotary, cache)

        return block

    def _run_layers(self, x: Array, around: Surroundings, tables: dict) -> tuple[Array, tuple[Routing, ...]]:
        """Run all blocks on whole sequences."""
        routing: dict[int, Routing] = {}
        for segment in self.loops():
            numbers = layer_numbers(segment, around.dropout)
            x, said = self.run_segment(segment, self.stored_runs(segment), x, around, tables, numbers)
            for run, each in zip(segment.runs, said, strict=True):
                routing |= by_layer(run, each, is_stacked=segment.repeats > 1)
        return x, tuple(routing[index] for index in sorted(routing))

    def run_segment(
        self, segment: Segment, weights: list[Any], x: Array, around: Surroundings, tables: dict, numbers: list[Any]
    ) -> tuple[Array, list[Routing | None]]:
        """Run a segment's blocks with given weights and numbers in the model: x, and what each run's routers say."""
        in_loop = segment.repeats > 1
        blocks = [checkpointed(self._block(run, around, tables), self.remat, in_loop=in_loop) for run in segment.runs]
        return run_segment(segment, blocks, weights, x, numbers)

    def check_stages(self, stages: int) -> None:
        """Check that the layers divide into pipeline stages.

        Args:
            stages: Stages of the mesh.

        Raises:
            LayoutRefused: If they do not; the error says what does.
        """
        staged_segment(self.layers, stages, scan_layers=self.scan_layers, bank_layers=self.bank_layers)

    @property
    def scores_in_schedule(self) -> bool:
        """Whether training on the mesh in context needs `token_loss`, which scores between the stages' passes."""
        return SCHEDULES[self.schedule].scores_inside and current_pipeline() is not None

    @property
    def pipelined_table_bytes(self) -> int:
        """Bytes of token tables, and of the sums of their gradients, that a pipelined step holds on each device."""
        return table_bytes(self) if SCHEDULES[self.schedule].scores_inside else 0

    def token_loss(
        self,
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        router_loss: Callable[[tuple[Routing, ...]], Array] | None = None,
    ) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""], tuple[Routing, ...]]:
        """Sum the weighted cross entropies of a batch, with gradients computed in the order of the pipeline's schedule.

        That is a training step's: it drops at the model's rates. To evaluate, score what `hidden_states` gives.

        Args:
            tokens: Token ids.
            targets: Token to predict at each position.
            weights: Weight of each position.
            positions: As `__call__`'s.
            segment_ids: As `__call__`'s.
            router_loss: What the statistics of the routers add to the sum, a linear function; None adds nothing.

        Returns:
            As `dew.parallel.vocabulary.sharded_token_loss`, and the statistics of each layer with experts.

        Raises:
            ValueError: If the mesh in context has no stages, the rows do not divide into microbatches, or the model
                computes in float16.
            LayoutRefused: If the layers do not divide into the stages.
        """
        pipeline = current_pipeline()
        if pipeline is None:
            raise ValueError(
                "token_loss follows a pipeline's schedule. Enter a mesh with stage=2 or more by jax.set_mesh, or score "
                "the logits of a call; LanguageModel chooses by itself. Received: a mesh in context with stage=1"
            )
        refuse_float16(self.dtype)
        scored = {"tokens": tokens, "targets": targets, "weights": weights}
        documents = {"positions": positions, "segment_ids": segment_ids}
        dropout = self._dropout(tokens.shape[0])
        return PipelinedDecoder(self, pipeline, dropout).token_loss(scored, documents, router_loss)

    def _run_cached_layers(self, x: Array, around: Surroundings, tables: dict, cache: Cache) -> tuple[Array, Cache]:
        """Run all blocks on new tokens, appending to the cache."""
        places = {
            layer: (bank, place)
            for bank, layers in enumerate(self._cache_banks().values())
            for place, layer in enumerate(layers)
        }
        for segment in self.loops():
            blocks = [self._block(run, around, tables) for run in segment.runs]
            x, cache = run_cached_segment(segment, blocks, self.stored_runs(segment), places, x, cache)
        return x, cache.replace(index=cache.index + x.shape[1])
