"""The layers of a decoder that predict tokens after the next one, run on whole sequences behind its last norm.

Entry points: `prediction_parts`, `further_hidden_states`; the layers are `dew.nn.prediction`'s. On a mesh with stages
they run outside the stages, like the head.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dew.arrays import Array, Float, Int
from dew.kernels.dropout import Dropout
from dew.kernels.quantized_product import quantized
from dew.nn.backbones.loops import rotary_of, whole_surroundings
from dew.nn.prediction import PredictionLayer
from dew.nn.remat import checkpointed
from dew.nn.router import Routing


def prediction_parts(decoder: Any) -> dict[str, PredictionLayer]:
    """Name the stored layers.

    Args:
        decoder: The `CausalTransformer`.
    """
    spec = decoder.prediction
    return {
        f"prediction_{index}": _layer(decoder, has_ends=index == 0 or not spec.is_shared)
        for index in range(spec.depth if spec else 0)
    }


def further_hidden_states(
    decoder: Any,
    hidden: Float[Array, "B T D"],
    further: Sequence[Mapping[str, Array | None]],
    positions: Int[Array, "B T"] | None,
    dropout: Dropout | None = None,
) -> tuple[tuple[Float[Array, "B T D"], ...], tuple[Routing, ...]]:
    """Run the layers one behind the other.

    Args:
        decoder: The `CausalTransformer`, bound to its variables.
        hidden: The output of its last norm.
        further: For each layer `tokens`, the token that it reads at each position beside the hidden state,
            `segment_ids` as the decoder's, and `weights` of the positions in the statistics of its router.
        positions: Position of each hidden state in its document; None counts from 0.
        dropout: What training drops; these layers are numbered behind the others. None where nothing is.

    Returns:
        What the head scores for each layer, and the statistics of those with experts.
    """
    spec, layer, length = decoder.prediction, _layer(decoder), hidden.shape[1]
    positions = jnp.arange(length, dtype=jnp.int32)[None] if positions is None else positions
    mixer = spec.layer.mixer
    rotary = rotary_of((spec.layer,), positions).get((mixer.rotary, mixer.rotary_dim)) if mixer.rotary else None
    scored, said = [], []
    for index, given in enumerate(further):
        weights = decoder.stored(f"prediction_{index}")
        if spec.is_shared:
            weights = decoder.stored("prediction_0") | {"block": weights["block"]}
        own = None if dropout is None else dropout.of_layer(len(decoder.layers) + index)
        around = whole_surroundings(length, given["segment_ids"], given["weights"], own)

        def run(weights, hidden, embedded, around=around):
            with quantized(decoder.quantization):
                return layer.apply({"params": decoder.ready(layer, weights)}, hidden, embedded, around, rotary)

        embedded = decoder.looked_up(given["tokens"])
        embedded = embedded if own is None else own.of_embeddings(embedded)
        x, normed, routing = checkpointed(run, decoder.remat, in_loop=False)(weights, hidden, embedded)
        hidden = normed if spec.is_shared else x
        scored.append(normed)
        said += [] if routing is None else [routing]
    return tuple(scored), tuple(said)


def _layer(decoder: Any, *, has_ends: bool = True) -> PredictionLayer:
    kinds = decoder.param_dtype, decoder.attention_impl, decoder.sequence_impl
    return PredictionLayer(decoder.features, decoder.prediction.layer, decoder.norm, has_ends, *kinds, parent=None)
