"""What people try in their first hour and cannot have is an error that says what to do."""

import re

import flax.linen as nn
import jax
import keras
import numpy as np
import pytest

import dew
import dew_keras
from dew.cli.main import main
from dew.kernels import attention as attention_kernels
from dew.kernels import attention_choice
from dew.kernels.attention import attention
from dew.nn import exchange_report
from dew.nn.block import LayerSpec
from dew.nn.mamba2 import Mamba2Spec
from dew.nn.norm import NormSpec
from dew.placement import build_mesh
from dew.training.placing import check_alive
from dew_keras.arrays import class_weights
from tests.dew_keras.nets import Linear, refused, rows
from tests.dew_keras.texts import tiny_language_module, tiny_tokenizer
from tests.tiny import tiny_decoder, tiny_layer


def test_freezing_a_model_is_refused():
    model = dew_keras.Model(Linear())
    model.trainable = True
    with pytest.raises(ValueError, match=r"optax\.multi_transform.*RouterTraining\(bias_rate=0\)"):
        model.trainable = False
    assert model.trainable


def test_a_rule_for_a_dimension_that_a_module_s_own_boxes_declare_is_taken_before_data_shows_them():
    class Declared(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.ones, ("row", "column"))
            return x @ self.param("kernel", init, (x.shape[-1], 8))

    x, _, _ = rows(8)
    model = dew_keras.Model(Declared())
    layout = dew.Layout(rules={"column": "fsdp"}, min_shard=1, tolerance=0)
    for _ in range(2):  # before and after the weights are there
        model.compile("sgd", "mse", layout=layout, mesh={"fsdp": 8})
        assert model.predict(x, verbose=0).shape == (8, 8)


def test_a_length_that_does_not_divide_over_the_sequence_axis_is_refused_by_compile_with_lengths_that_work():
    model = dew_keras.Model(tiny_decoder())
    model.compile("sgd", mesh={"sequence": 8}, sequence_length=48)
    compiled = model.get_compile_config()
    with pytest.raises(dew_keras.LayoutRefused, match=r"rows of 40 positions .* Use rows of 32 or 48 positions"):
        model.compile("sgd", mesh={"sequence": 8}, sequence_length=40)
    assert model.get_compile_config() == compiled
    rows = np.ones((8, 45), np.int32)
    with pytest.raises(dew_keras.LayoutRefused, match=r"rows of 44 positions .* Use rows of 32 or 48 positions"):
        model.fit(rows, batch_size=8, verbose=0)
    assert not model._engine.is_built, "refused before anything was made"
    assert np.isfinite(model.evaluate(np.ones((8, 49), np.int32), batch_size=8, verbose=0, return_dict=True)["loss"])


def test_a_kernel_that_cannot_drop_is_refused_by_fit_and_runs_every_other_verb(monkeypatch):
    hopper = attention_choice.Accelerator(platform="cuda", capability=(9, 0), cudnn=91000)
    for module in (attention_choice, exchange_report):
        monkeypatch.setattr(module, "accelerator", lambda mesh=None: hopper)
    ran = []

    def cudnn(query, key, value, visibility, scale):
        ran.append(query.shape)
        return attention(query, key, value, visibility=visibility, scale=scale, implementation="xla")

    monkeypatch.setattr(attention_kernels, "cudnn_attention", cudnn)
    batch, losses = {"tokens": np.arange(8 * 33, dtype=np.int32).reshape(8, 33) % 64}, []
    model = dew_keras.Model(tiny_decoder(num_layers=2, attention_dropout_rate=0.5, dtype="bfloat16"))
    for kernel in ("xla", "cudnn"):
        model.compile("sgd", mesh={"sequence": 4}, attention_impl=kernel, sequence_length=32)
        losses.append(model.evaluate(batch, batch_size=8, verbose=0)[0])
        assert bool(ran) == (kernel == "cudnn")
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert model.predict(batch["tokens"][:, :32], verbose=0).shape == (8, 32, 64)
    assert len(model.generate([[5, 6, 7]], max_new_tokens=2, stop_token_ids=[])[0]) == 5
    advice = "'cudnn' cannot run: it has no dropout of probabilities.* Use attention_impl='auto'"
    with refused(model, advice, dew_keras.LayoutRefused):
        model.fit(batch, batch_size=8, verbose=0)


def test_class_weights_round_as_keras_does():
    targets = np.array([0.9999, 0.0, 1.0], np.float32)
    np.testing.assert_array_equal(class_weights(targets, {0: 10.0, 1: 2.0}), [2.0, 10.0, 2.0])


def test_consumed_weights_are_named():
    leaf = keras.ops.ones((2, 3))
    check_alive({"a": leaf})
    leaf.delete()
    with pytest.raises(ValueError, match=r"consumed by a training run.*shape \(2, 3\)"):
        check_alive({"a": leaf})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("train.txt", "Give a list of texts"),
        ({"tokens": np.ones((2, 9), int), "loss_mask": np.full((2, 9), 0.5)}, "loss_mask says for each token"),
        (np.full((2, 9), 2**33 + 5), "must fit 32 bits"),
    ],
)
def test_rows_that_would_be_read_as_something_else_are_refused(data, message):
    model = dew_keras.Model(tiny_decoder())
    model.compile("sgd")
    with pytest.raises(ValueError, match=message):
        model.fit(data, verbose=0)


def test_a_cross_entropy_by_name_and_foreign_ids_are_refused_for_logits():
    model = dew_keras.Model(tiny_decoder())
    with pytest.raises(ValueError, match="from_logits=True"):
        model.compile("sgd", "sparse_categorical_crossentropy")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(ValueError, match="Token ids must lie in"):
        model.evaluate(np.full((8, 9), 10**6), verbose=0)


def test_a_mesh_that_is_too_large_says_how_to_simulate_it_and_a_planned_command_that_it_is_planned(capsys):
    with pytest.raises(ValueError, match="xla_force_host_platform_device_count=16"):
        dew_keras.Model(Linear()).compile("sgd", "mse", mesh=dew.MeshSpec(fsdp=16))
    assert main(["launch"]) == 2
    assert "not there yet" in capsys.readouterr().err


def test_validation_data_may_come_in_batches_of_its_own():
    x, y, _ = rows(8)
    model = dew_keras.Model(Linear())
    model.compile("sgd", "mse")
    history = model.fit(x, y, 4, verbose=0, validation_data=((x, y) for _ in range(1)))
    np.testing.assert_allclose(history.history["val_loss"][0], model.evaluate(x, y, verbose=0), rtol=1e-6)


def test_a_rule_that_matches_nothing_in_a_plain_module_is_refused_when_data_shows_it():
    x, y, _ = rows(8)
    model = dew_keras.Model(Linear())
    model.compile("sgd", "mse", mesh={"fsdp": 8})
    model.fit(x, y, verbose=0)
    before = model.get_weights()
    model.compile("sgd", "mse", layout=dew.Layout(rules={"embd": "fsdp"}), mesh={"fsdp": 8})
    with pytest.raises(dew.placement.LayoutRefused, match=r"a rule for 'embd'.*none, as a plain Flax module's do"):
        model.fit(x, y, verbose=0)
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_inputs_of_another_shape_are_named_with_what_the_layer_expects():
    x, y, _ = rows(8)
    model = dew_keras.Model(Linear())
    model.compile("sgd", "mse")
    model.fit(x, y, verbose=0)
    for verb in (lambda: model.predict(x[:, :3], verbose=0), lambda: model.fit(x[:, :3], y, verbose=0)):
        with pytest.raises(
            ValueError, match=r"Inputs of shape \(8, 3\) do not fit Linear: dense holds .*'kernel' of shape \(4, 3\)"
        ):
            verb()
    assert model.predict(x, verbose=0).shape == (8, 3)


@pytest.mark.parametrize("shuffle", ["batch", None, 0.5])
def test_a_shuffle_that_is_no_truth_value_is_refused(shuffle):
    x, y, _ = rows(8)
    model = dew_keras.Model(Linear())
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="shuffle must be True"):
        model.fit(x, y, verbose=0, shuffle=shuffle)


def test_summary_says_which_weights_are_below_min_shard():
    x, _, _ = rows(8)
    model = dew_keras.Model(Linear(8))
    model.compile("sgd", "mse", mesh={"fsdp": 8}, layout=dew.Layout(min_shard=32))
    model.build(x)
    said = []
    model.summary(print_fn=said.append)
    assert "fewer elements than min_shard=32, so whole: 1 leaves (params/dense/bias)" in said[0]


def test_a_length_that_a_scan_cannot_cut_is_refused_before_anything_is_made():
    scan = Mamba2Spec(num_heads=4, head_dim=8, num_groups=1, state_size=6)
    layer = LayerSpec(mixer=scan, mlp=None, norm=NormSpec(eps=1e-5))
    model = dew_keras.Model(tiny_decoder(layers=(layer,) * 2))
    message = r"slices of at least 3 tokens .* which 16 is not\. Use rows of 24 positions"
    with pytest.raises(dew_keras.LayoutRefused, match=message):
        model.compile("sgd", mesh={"sequence": 8}, sequence_length=16)
    model.compile("sgd", mesh={"sequence": 8})
    for verb in (model.fit, model.evaluate):
        with pytest.raises(dew_keras.LayoutRefused, match=message):
            verb(np.ones((8, 17), np.int32), batch_size=8, verbose=0)
    with pytest.raises(dew_keras.LayoutRefused, match=message):
        model.fit(iter([np.ones((8, 17), np.int32)]), steps_per_epoch=1, verbose=0)
    assert not model._engine.is_built


def test_rows_of_texts_get_a_length_that_the_mesh_takes_and_fit_says_it(capsys):
    model = dew_keras.Model(tiny_language_module(), tiny_tokenizer())
    model.compile("sgd", mesh=build_mesh(dew.MeshSpec(sequence=3), jax.devices()[:3]))
    model.fit(["hello there, hello", "abc"], batch_size=2, epochs=1)
    first = capsys.readouterr().out.splitlines()[0]
    assert "sequence length 48," in first  # 32 would do for the texts, but not for three slices of an even length
    assert first.endswith("rows cut over sequence=3 into 16 positions each")


def test_summary_says_what_a_mesh_of_positions_and_stages_runs_and_where_it_generates():
    said = []
    model = dew_keras.Model(tiny_decoder(layers=(tiny_layer(num_kv_heads=1),) * 2))
    model.compile("sgd", mesh={"sequence": 2, "stage": 2, "tensor": 2}, layout=dew_keras.Layout(min_shard=512))
    model.summary(print_fn=said.append)
    # On two devices' heads: two query heads, of which each of two slices trades one.
    assert re.search(r"exchange of 2 layers of 64 tokens: all_to_all, [\d,]+ bytes a device .*; kernel xla \(", said[0])
    assert "\nattention of" not in said[0]
    assert "cache of 2 layers: 1 key/value head over tensor=2: each of the 2 devices of a group keeps all" in said[0]
    assert re.search(r"Generates on data=2, fsdp=2, tensor=2: [\d.]+ kB of weights per device", said[0])
    model.compile("sgd", mesh={"fsdp": 8}, layout=dew_keras.Layout(min_shard=512))
    model.summary(print_fn=said.append)
    assert "attention of 2 layers of 64 tokens, float32: xla" in said[1]
    assert "Generates on" not in said[1]
    assert "cache of" not in said[1]
