"""Next-token prediction: one sum of cross entropies over one count of scored tokens.

Entry point: `LanguageModel`. Tokens are shifted on the host, before rows or positions are split
over devices, so no device needs its neighbour's first token.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dew.nn.exchange_report import check_row_length
from dew.nn.router import Routing, router_loss
from dew.nn.sharding import without_mesh
from dew.objectives.base import LossOutput, Ratio
from dew.objectives.prediction import PREDICTION_LOSS, Further, checked_weight, further_targets, score_further
from dew.objectives.routing import CROSS_ENTROPY, EXPERT_LOAD, busiest, routing_metrics
from dew.parallel.vocabulary import sharded_token_loss
from dew.tree import closest

FIELDS = ("tokens", "loss_mask", "segment_ids", "positions")


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """The token cross entropy of a decoder.

    Batches hold `tokens` int [B, T + 1] and optionally `loss_mask` bool [B, T + 1] (token i is
    scored where true), `segment_ids` int [B, T + 1] (documents packed in a row, 0 marks
    padding) and `positions` int [B, T + 1] (position inside the document).

    Attributes:
        module: A module with `hidden_states`, `head_weight` and `vocab_size`, such as
            `CausalTransformer`; its `logit_scale` and `logit_softcap`, where it has them, apply to
            the logits.
        mtp_weight: Weight of the tokens after the next one (multi-token prediction) in the loss of a module with
            layers that predict them: their cross entropies, the mean over these layers, over the mass of the next
            tokens. None takes 0.1; 0 computes none of them.
    """

    module: Any
    mtp_weight: float | None = None

    trains_by_token_loss: ClassVar[bool] = True
    """Whether a module that scores inside the schedule of its pipeline is asked for `token_loss`."""

    def __post_init__(self) -> None:
        checked_weight(self.mtp_weight, self.module)

    def init(self, key: jax.Array) -> Mapping[str, Any]:
        """Make fresh variables.

        Args:
            key: Random key.

        Returns:
            The module's collections, parameters boxed with their logical axes.
        """
        with without_mesh():  # two tokens show the shapes; no mesh has to split them
            return self.module.init(key, jnp.zeros((1, 2), jnp.int32))

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Shift tokens against targets and turn masks into weights.

        Args:
            batch: A batch as the class describes it.

        Returns:
            `inputs`, `targets` int32 [B, T], `weights` float32 [B, T] and, where given,
            `segment_ids` and `positions` int32 [B, T]; what `further_targets` gives, where further tokens weigh.

        Raises:
            ValueError: If a field is unknown, has another shape than `tokens`, or a token is not
                in the vocabulary.
        """
        tokens = self._checked(batch)
        weights = np.ones(tokens.shape, bool)
        if "loss_mask" in batch:
            weights &= np.asarray(batch["loss_mask"]).astype(bool)
        prepared = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        weights, segments = weights[:, 1:], None
        if "segment_ids" in batch:
            segments = np.asarray(batch["segment_ids"], np.int32)
            # The first token of a document has no predecessor in it, and padding predicts nothing.
            weights = weights & (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
            prepared["segment_ids"] = segments[:, :-1]
            prepared["positions"] = positions_in_segments(segments)[:, :-1]
        if "positions" in batch:
            prepared["positions"] = np.asarray(batch["positions"], np.int32)[:, :-1]
        prepared["weights"] = weights.astype(np.float32)
        if self._mtp_weight:
            prepared |= further_targets(tokens, weights, segments, self.module.prediction.depth)
        return {name: np.ascontiguousarray(value) for name, value in prepared.items()}

    def check_rows(self, mesh: Any, prepared: Mapping[str, Any], *, train: bool) -> None:
        """Refuse rows that some layer could not compute on a mesh, before anything is traced.

        Args:
            mesh: The mesh; the active rules say what it splits.
            prepared: What `prepare` returned.
            train: Whether they are trained on.

        Raises:
            LayoutRefused: With lengths that every layer takes.
        """
        length, packed = prepared["inputs"].shape[1], "segment_ids" in prepared
        check_row_length(self.module, mesh, length, packed=packed, train=train)

    def loss(
        self, variables: Mapping[str, Any], batch: Mapping[str, Any], *, key: jax.Array, train: bool
    ) -> LossOutput:
        """Score one prepared batch.

        Args:
            variables: The module's collections.
            batch: What `prepare` returned.
            key: Random key for dropout.
            train: Whether this is a training step.

        Returns:
            The cross entropy in nats per scored token, and the metric `token_accuracy`. A module with experts adds what
            its `router_training` asks for, and the metrics of `dew.objectives.routing`; layers that predict further
            tokens add theirs by `mtp_weight`, and the metric `prediction_loss`.
        """
        total, correct, mass, routing, further = self._scored(variables, batch, key, train)
        metrics = {"token_accuracy": Ratio(correct, mass)}
        if routing or further:
            metrics[CROSS_ENTROPY] = Ratio(total - self._added(routing, further), mass)
        if routing:
            experts = self.module.expert_layers
            metrics |= routing_metrics(routing, (*experts, *self.module.prediction_experts) if further else experts)
        if further:
            metrics[PREDICTION_LOSS] = further.loss
        return LossOutput(Ratio(total, mass), metrics)

    def _added(self, routing: tuple[Routing, ...], further: Further | None) -> Any:
        """Sum what routers and layers that predict further tokens add to the total of the next tokens."""
        asked = router_loss(routing, self.module.router_training) if routing else 0.0
        return asked + self._mtp_weight * further.mean if further else asked

    @property
    def _mtp_weight(self) -> float:
        return checked_weight(self.mtp_weight, self.module)

    def _scored(
        self, variables: Mapping[str, Any], batch: Mapping[str, Any], key: jax.Array, train: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array, tuple[Routing, ...], Further | None]:
        """Sum the losses, the tokens that are predicted and the weights; ask routers where there are any."""
        documents = {name: batch.get(name) for name in ("positions", "segment_ids")}
        training = {"train": train, "rngs": {"dropout": key} if train else None}
        if train and getattr(self.module, "scores_in_schedule", False):
            scored = (batch["inputs"], batch["targets"], batch["weights"])
            added = functools.partial(router_loss, training=self.module.router_training)
            given = {**documents, "router_loss": added, "rngs": training["rngs"]}
            return *self.module.apply(variables, *scored, **given, method="token_loss"), None
        given = documents | training
        if getattr(self.module, "expert_layers", ()):
            counted = (batch["inputs"], batch["weights"])
            hidden, routing = self.module.apply(variables, *counted, **given, method="routed_hidden_states")
        else:
            hidden, routing = self.module.apply(variables, batch["inputs"], **given, method="hidden_states"), ()
        total, correct, mass = self._token_loss(variables, hidden, batch["targets"], batch["weights"])
        further = None
        if self._mtp_weight:
            token_loss = functools.partial(self._token_loss, variables)
            further = score_further(self.module, variables, hidden, batch, token_loss, training)
            routing = (*routing, *further.routing)
        return total + self._added(routing, further), correct, mass, routing, further

    def _token_loss(self, variables: Mapping[str, Any], hidden: Any, targets: Any, weights: Any) -> tuple[Any, ...]:
        """Sum the cross entropies of hidden states' tokens, those that are predicted, and the weights."""
        head, mesh = self.module.head_weight(variables), jax.sharding.get_abstract_mesh()
        scale, softcap = getattr(self.module, "logit_scale", 1.0), getattr(self.module, "logit_softcap", None)
        return sharded_token_loss(mesh, hidden, head, targets, weights, scale=scale, softcap=softcap)

    def report(self, statistics: Mapping[str, Ratio]) -> dict[str, float]:
        """Divide pooled statistics and add the perplexity of the pooled loss.

        Args:
            statistics: Host ratios by name.

        Returns:
            Values by name; `perplexity` is the exponential of the cross entropy, which is `loss` without what routers
            add to it, and `expert_load_max` the load of the busiest expert of any layer over an even share.
        """
        values = {name: ratio.value() for name, ratio in statistics.items() if name != EXPERT_LOAD}
        if EXPERT_LOAD in statistics:
            values["expert_load_max"] = busiest(statistics[EXPERT_LOAD])
        entropy = values.get(CROSS_ENTROPY, values["loss"])
        return {**values, "perplexity": math.exp(entropy) if entropy < 700 else math.inf}

    def _checked(self, batch: Mapping[str, Any]) -> np.ndarray:
        for name in batch:
            if name not in FIELDS:
                near = closest(name, FIELDS)
                hint = f" Did you mean {near!r}?" if near else ""
                raise ValueError(f"A language batch holds the fields {FIELDS}.{hint} Received: {name!r}.")
        if "tokens" not in batch:
            raise ValueError(f"A language batch needs the field 'tokens'. Received: {sorted(batch)}.")
        tokens = np.asarray(batch["tokens"])
        if tokens.ndim != 2 or tokens.shape[1] < 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                "tokens must be integers [rows, T + 1] with T >= 1; the model reads T positions and is "
                f"scored on the next token. Received: shape={tokens.shape}, dtype={tokens.dtype}."
            )
        for name in FIELDS[1:]:
            if name in batch and np.shape(batch[name]) != tokens.shape:
                raise ValueError(
                    f"{name} must have the shape of tokens, {tokens.shape}. Received: shape={np.shape(batch[name])}."
                )
        check_token_ids(self.module, tokens, positions=tokens.shape[1] - 1)
        return tokens.astype(np.int32)


def check_token_ids(module: Any, tokens: np.ndarray, *, positions: int) -> None:
    """Refuse tokens that a module would read as something else: a lookup outside a table is no error on a device.

    Args:
        module: A module with `vocab_size` and, where its context ends, `max_length`.
        tokens: Token ids.
        positions: How many positions of a row the module reads.

    Raises:
        ValueError: If a token is not in the vocabulary, or a row exceeds the context.
    """
    vocab = module.vocab_size
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab):
        raise ValueError(
            f"Token ids must lie in [0, {vocab}), the model's vocabulary. Received ids from "
            f"{tokens.min()} to {tokens.max()}. Use the tokenizer of this model."
        )
    longest = getattr(module, "max_length", None)
    if longest is not None and positions > longest:
        raise ValueError(
            f"Rows of {positions} positions exceed the model's context of {longest}. "
            "Cut the rows or lower sequence_length."
        )


def positions_in_segments(segments: np.ndarray) -> np.ndarray:
    """Count positions from 0 inside each document of a packed row.

    Args:
        segments: Document numbers, int [B, T]; equal neighbours belong together.

    Returns:
        Positions, int32 [B, T].
    """
    steps = np.arange(segments.shape[1], dtype=np.int32)
    starts = np.ones(segments.shape, bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return steps - np.maximum.accumulate(np.where(starts, steps, 0), axis=1)
