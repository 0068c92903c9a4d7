"""What compile cannot honour is an error at compile, with the name and the next step."""

import inspect
import json

import keras
import optax
import pytest

import dew_keras
from dew.placement.mesh import build_mesh
from dew_keras import TopK
from tests.dew_keras.nets import Linear, TwoHeads, refused, rows
from tests.tiny import tiny_decoder


@pytest.fixture(scope="module")
def trained():
    """A model in the middle of its training; what is refused leaves it there."""
    x, y, _ = rows(8)
    model = dew_keras.Model(Linear())
    model.compile("adam", "mse", mesh={"fsdp": 8})
    model.fit(x, y, verbose=0)
    return model


@pytest.fixture(scope="module")
def decoder():
    """A language model that is compiled."""
    model = dew_keras.Model(tiny_decoder())
    model.compile("sgd")
    return model


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
        ({"mesh": "auto"}, r"mesh='auto'"),
        ({"mesh": {"fdsp": 8}}, r"fsdp"),
        ({"accumulation": 0}, r"accumulation=0"),
        ({"sequence_length": 0}, r"sequence_length=0"),
        ({"sampler": "topk"}, r"Did you mean 'top_k'.*Received: sampler='topk'"),
        ({"dtype": "float8"}, r"Unknown dtype name"),
        ({"remat": "full"}, r"Linear decides it in its own code"),
        ({"schedule": "1f1b"}, r"Linear has none. Received: schedule='1f1b'"),
        ({"quantization": "int8"}, r"Linear multiplies in its own code.*Received: quantization='int8'"),
        ({"attention_impl": "xla"}, r"Linear attends in its own code. Received: attention_impl='xla'"),
        ({"sequence_impl": "ring"}, r"Linear attends in its own code. Received: sequence_impl='ring'"),
        ({"mesh": {"stage": 2}}, r"stage=2 pipelines a layer stack, and Linear has none"),
        ({"optimizer": keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "accumulation": 2}, r"not both"),
    ],
)
def test_a_bad_argument_is_refused_at_compile_and_nothing_changes(arguments, text, trained):
    with refused(trained, text, (ValueError, TypeError)):
        trained.compile(**arguments)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"metrics": ["mse"]}, r"Known names: accuracy, perplexity, token_accuracy"),
        ({"metrics": [keras.metrics.MeanSquaredError()]}, r"give a Keras loss too"),
        ({"metrics": "accuracy"}, r"Expected `metrics` argument to be a list or tuple. Received: metrics='accuracy'"),
        ({"loss_weights": [2.0]}, r"Received: loss_weights=\[2.0\]"),
        ({"remat": "minimal"}, r"minimal"),
        ({"mesh": {"stage": 8}}, r"stage=8 does not divide the model's 4 layers. Use stage=2 or 4"),
        ({"quantization": "int4"}, r"quantization must be 'int8', 'fp8' or None"),
        ({"schedule": "zigzag"}, r"schedule must be 'gpipe' or '1f1b'"),
        ({"attention_impl": "flash"}, r"must be one of 'auto', .*Received: attention_impl='flash'"),
        ({"sequence_impl": "rings"}, r"must be one of 'auto', .*Received: sequence_impl='rings'"),
        (
            {"sequence_impl": "banded", "mesh": {"sequence": 4}, "sequence_length": 32},
            r"it needs a window or chunks\. Use sequence_impl='auto'\.",
        ),
        (
            {"attention_impl": "cudnn", "mesh": {"sequence": 4}, "sequence_length": 32},
            r"attention_impl='cudnn' cannot run: the device is a cpu.* Use attention_impl='auto'\.",
        ),
    ],
)
def test_a_language_model_refuses_what_it_cannot_do(arguments, text, decoder):
    with refused(decoder, text):
        decoder.compile(**arguments)


class OwnLoss(dew_keras.Model):
    """A model with a loss of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(y_pred)


def test_1f1b_is_refused_at_compile_for_another_loss_than_the_token_cross_entropy():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    settings = {"mesh": {"stage": 2}, "schedule": "1f1b"}
    for model, given, named in (
        (dew_keras.Model(tiny_decoder()), loss, r"loss=<.*sparse_categorical_crossentropy"),
        (OwnLoss(tiny_decoder()), None, "compute_loss of OwnLoss"),
    ):
        with pytest.raises(ValueError, match=rf"Use schedule='gpipe' for another loss. Received: {named}"):
            model.compile(loss=given, **settings)
        assert not model.compiled
        model.compile(loss=given, mesh={"stage": 2})
        assert model.module.schedule == "gpipe"
    dew_keras.Model(tiny_decoder()).compile(**settings)


def test_a_built_mesh_with_stages_is_refused_since_it_does_not_say_its_microbatches(decoder):
    mesh = build_mesh(dew_keras.MeshSpec(stage=2, microbatches=4))
    with refused(decoder, r"built mesh with stage=2 does not say how many microbatches its pipeline runs"):
        decoder.compile(mesh=mesh)


def test_a_layout_must_be_a_layout():
    with pytest.raises(TypeError, match=r"dew_keras\.Layout"):
        dew_keras.Model(Linear()).compile(layout={"embed": "fsdp"})


def test_compile_arguments_survive_json():
    optimizer = keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.01, 10), weight_decay=0.1, clipnorm=1.0)
    model = dew_keras.Model(TwoHeads())
    model.compile(
        optimizer,
        {"a": "mse", "b": keras.losses.CategoricalCrossentropy(from_logits=True)},
        {"a": 1.0, "b": 0.5},
        {"a": [keras.metrics.MeanAbsoluteError(name="error")], "b": ["accuracy"]},
        steps_per_execution=2,
        mesh=dew_keras.MeshSpec(tensor=2),
        layout=dew_keras.Layout(min_shard=1),
        accumulation=2,
        sampler=TopK(k=3),
    )
    config = json.loads(json.dumps(model.get_compile_config()))
    again = dew_keras.Model(TwoHeads())
    again.compile_from_config(config)
    assert again.get_compile_config() == model.get_compile_config()
    assert again.mesh == model.mesh
    assert again.layout == model.layout
    assert again.optimizer is not optimizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": optax.sgd(0.1), "loss": "mse"}, "optax transformation"),
        ({"loss": lambda y, y_pred: (y - y_pred) ** 2}, "A lambda in `loss`"),
    ],
)
def test_what_no_file_can_hold_is_named(arguments, message):
    model = dew_keras.Model(Linear())
    model.compile(**arguments)
    with pytest.raises(ValueError, match=message):
        model.get_compile_config()


VERBS = (
    *("compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch", "summary"),
    *("get_weights", "set_weights", "save", "save_weights", "load_weights", "reset_metrics", "get_compile_config"),
    *("compile_from_config", "compute_loss", "compute_metrics"),
)
OWN_DEFAULTS = {"compile": {"optimizer", "loss", "weighted_metrics"}}


@pytest.mark.parametrize("verb", VERBS)
def test_arguments_are_those_of_keras_in_its_order_with_its_defaults(verb):
    ours, theirs = (
        {
            name: parameter.default
            for name, parameter in inspect.signature(getattr(model, verb)).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        }
        for model in (dew_keras.Model, keras.Model)
    )
    assert list(ours) == list(theirs)
    assert {name for name in ours if ours[name] != theirs[name]} == OWN_DEFAULTS.get(verb, set())
