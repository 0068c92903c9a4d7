"""The verbs on a mesh with pipeline stages are the verbs on one device, ragged last batches included."""

import functools

import keras
import numpy as np
import pytest

import dew_keras
from tests.tiny import tiny_batch, tiny_decoder

LAYOUT = dew_keras.Layout(min_shard=512, tolerance=0.5)
ROWS = 11  # neither batches of 8 nor microbatches divide them


@functools.cache
def worked(schedule):
    """Fit an epoch, evaluate and predict; None as schedule is a mesh without stages."""
    model = dew_keras.Model(tiny_decoder(num_layers=2), seed=3)
    mesh = {"stage": 2, "fsdp": 2, "microbatches": 4} if schedule else {"fsdp": 2}
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-2), mesh=mesh, layout=LAYOUT, schedule=schedule)
    data = tiny_batch(rows=ROWS)
    history = model.fit(data, batch_size=8, shuffle=False, verbose=0).history
    scores = model.evaluate(data, batch_size=8, verbose=0, return_dict=True)
    return history, scores, model.predict(data["tokens"][:, :-1], batch_size=8, verbose=0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_fit_evaluate_and_predict_are_those_without_stages(schedule):
    (history, scores, outputs), (want_history, want_scores, want_outputs) = worked(schedule), worked(None)
    assert history.keys() == want_history.keys()
    assert history["loss"] == pytest.approx(want_history["loss"], rel=1e-5)
    assert scores == pytest.approx(want_scores, rel=1e-4)
    assert outputs.shape == (ROWS, 16, 64)
    np.testing.assert_allclose(outputs, want_outputs, rtol=0, atol=1e-4 * np.abs(want_outputs).max())
