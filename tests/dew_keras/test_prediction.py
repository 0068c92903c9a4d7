"""Layers that predict further tokens in the facade: trained by `fit`, reported, saved, and out of the way elsewhere."""

import jax
import keras
import numpy as np
import pytest

from dew.nn.prediction import PredictionSpec
from dew.placement.layout import Layout
from dew.tree import named_leaves
from dew_keras import Model, load_model
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
LENGTH = 16


def decoder(**fields):
    return tiny_decoder(num_layers=2, prediction=PredictionSpec(layer=tiny_layer()), **fields)


def compiled(module=None, **options):
    model = Model(module or decoder(), seed=0)
    model.compile(keras.optimizers.Adam(1e-2), layout=Layout(min_shard=512, tolerance=1.0), **options)
    return model


def rows(count):
    return {"tokens": tiny_batch(rows=count, length=LENGTH)["tokens"]}


@pytest.mark.parametrize("weight", [None, 0.5, 0])
def test_evaluate_reports_them_and_adds_their_share(weight):
    logs = compiled(mtp_weight=weight).evaluate(rows(6), batch_size=8, verbose=0, return_dict=True)  # filled up
    entropy, weight = np.log(logs["perplexity"]), 0.1 if weight is None else weight
    assert ("prediction_loss" in logs) == (weight > 0)
    # A row of T positions predicts T next tokens and T - 1 further ones.
    further = logs.get("prediction_loss", 0.0) * (LENGTH - 1) / LENGTH
    assert logs["loss"] == pytest.approx(entropy + weight * further, rel=1e-5)


def test_fit_trains_them_on_any_mesh_and_generate_leaves_the_run_alone(tmp_path):
    meshes = ({"fsdp": 2, "tensor": 2, "sequence": 2}, {"data": 8})
    first, second = (compiled(mesh=mesh) for mesh in meshes)
    history = [m.fit(rows(13), batch_size=8, epochs=2, verbose=0, shuffle=False).history for m in (first, second)]
    assert "prediction_loss" in history[0]
    for name, values in history[0].items():
        np.testing.assert_allclose(values, history[1][name], rtol=1e-5, err_msg=name)
    before = jax.device_get(named_leaves(first.variables))
    assert any("prediction_0" in path for path in before)
    prompts = [[3, 4, 5], [7, 8]]
    tokens = [m.generate(prompts, max_new_tokens=6, stop_token_ids=[]) for m in (first, second)]
    np.testing.assert_equal(*tokens)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(named_leaves(first.variables)), before)
    first.save(tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras")
    assert again.module.prediction == first.module.prediction
    for model in (first, again):
        model.fit(rows(8), batch_size=8, verbose=0, shuffle=False)
    want, got = (jax.device_get(named_leaves(model.variables)) for model in (first, again))
    assert want.keys() == got.keys()
    for path, value in want.items():
        np.testing.assert_allclose(got[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


def test_what_would_leave_them_untrained_is_refused_by_name():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with pytest.raises(ValueError, match=r"trained by loss='auto' alone.*prediction_layers=False.* Received: loss="):
        compiled(loss=loss)
    compiled(decoder().clone(prediction=None), loss=loss)
    with pytest.raises(ValueError, match="this module has none"):
        compiled(tiny_decoder(), mtp_weight=0.1)
    with pytest.raises(ValueError, match=r"schedule='1f1b' scores between .* layers that predict further tokens"):
        compiled(schedule="1f1b")
