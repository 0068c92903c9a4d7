"""Metrics of next-token prediction as Keras metric classes, for modules under a Keras loss.

Entry point: `Perplexity`. A language model under `loss="auto"` reports the same numbers without them.
"""

from __future__ import annotations

from typing import Any

import keras


class Perplexity(keras.metrics.Mean):
    """exp of the mean cross entropy over all tokens that carry weight, whatever rows and batches they are in.

    Args:
        from_logits: Whether predictions are logits; otherwise they are probabilities.
        name: Log key.
        dtype: As for any Keras metric.
    """

    def __init__(self, from_logits: bool = True, name: str = "perplexity", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)
        self.from_logits = from_logits

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add the tokens of a batch.

        Args:
            y_true: Token ids [rows, ...].
            y_pred: Scores [rows, ..., vocabulary].
            sample_weight: One weight per token or per row, or None.
        """
        y_pred = keras.ops.convert_to_tensor(y_pred, dtype=self.dtype)
        y_true = keras.ops.reshape(y_true, keras.ops.shape(y_pred)[:-1])
        losses = keras.ops.sparse_categorical_crossentropy(y_true, y_pred, from_logits=self.from_logits)
        weight = None
        if sample_weight is not None:
            weight = keras.ops.convert_to_tensor(sample_weight, dtype=self.dtype)
            weight = keras.ops.reshape(weight, (*weight.shape, *(1,) * (len(losses.shape) - len(weight.shape))))
            weight = keras.ops.reshape(keras.ops.broadcast_to(weight, losses.shape), (-1,))
        super().update_state(keras.ops.reshape(losses, (-1,)), weight)

    def result(self) -> Any:
        """Return the perplexity so far; 1 before any token."""
        return keras.ops.exp(super().result())

    def get_config(self) -> dict[str, Any]:
        """Return what makes the same metric again."""
        return {**super().get_config(), "from_logits": self.from_logits}
