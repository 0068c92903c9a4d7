"""What compile cannot honour is an error at compile, with the name and the next step."""

import keras
import pytest

import dew_keras
from tests.dew_keras.nets import Linear
from tests.tiny import tiny_decoder


def compiles(module=None, **arguments):
    dew_keras.Model(module or Linear()).compile(**arguments)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"optimizer": "adamm"}, r"Did you mean 'adam.*'\?.*Received: optimizer='adamm'"),
        ({"loss": "mea"}, r"Unknown loss name.*Received: loss='mea'"),
        ({"loss": {"a": "mse", "b": "msee"}}, r"Did you mean 'mse'.*Received: loss='msee'"),
        ({"metrics": ["acuracy"]}, r"Did you mean 'accuracy'.*Received: metric='acuracy'"),
        ({"weighted_metrics": ["msle2"]}, r"Received: metric='msle2'"),
        ({"metrics": "mse"}, r"Expected `metrics` argument to be a list, tuple, or dict"),
        ({"loss": 3}, r"Could not interpret loss identifier. Received: loss=3"),
        ({"loss": keras.losses.MeanSquaredError(reduction=None)}, r"must reduce to one number"),
        ({"run_eagerly": True}, r"run_eagerly"),
        ({"steps_per_execution": 4}, r"steps_per_execution=4"),
        ({"jit_compile": False}, r"jit_compile=False"),
        ({"mesh": "auto"}, r"mesh='auto'"),
        ({"mesh": {"fdsp": 8}}, r"fsdp"),
        ({"accumulation": 0}, r"accumulation=0"),
        ({"sequence_length": 0}, r"sequence_length=0"),
        ({"sampler": "topk"}, r"Did you mean 'top_k'.*Received: sampler='topk'"),
        ({"dtype": "float8"}, r"Unknown dtype name"),
        ({"remat": "full"}, r"Linear decides it in its own code"),
        ({"optimizer": keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "accumulation": 2}, r"not both"),
    ],
)
def test_a_bad_argument_is_refused_at_compile(arguments, text):
    with pytest.raises((ValueError, TypeError), match=text):
        compiles(**arguments)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"metrics": ["mse"]}, r"Known names: accuracy, perplexity, token_accuracy"),
        ({"metrics": [keras.metrics.MeanSquaredError()]}, r"give a Keras loss too"),
        ({"metrics": "accuracy"}, r"Expected `metrics` argument to be a list or tuple. Received: metrics='accuracy'"),
        ({"loss_weights": [2.0]}, r"Received: loss_weights=\[2.0\]"),
        ({"remat": "minimal"}, r"minimal"),
        ({"mesh": {"stage": 2}}, r"stage"),
    ],
)
def test_a_language_model_refuses_what_it_cannot_do(arguments, text):
    with pytest.raises(ValueError, match=text):
        compiles(tiny_decoder(), **arguments)


def test_a_layout_must_be_a_layout():
    with pytest.raises(TypeError, match=r"dew_keras\.Layout"):
        compiles(layout={"embed": "fsdp"})
