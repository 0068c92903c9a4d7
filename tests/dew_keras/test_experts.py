"""The facade trains checkpoints with experts on an expert axis and logs what their routers say."""

import keras
import numpy as np
import pytest

import dew_keras
from dew.objectives.routing import ROUTING_METRICS
from tests.pretrained.checkpoints import FIXTURES


def test_fit_logs_what_the_routers_say_and_gives_the_losses_of_one_device():
    tokens = np.random.default_rng(0).integers(0, 64, (8, 13)).astype(np.int32)

    def history(mesh):
        model = dew_keras.Model.from_preset(str(FIXTURES / "mixtral"))
        model.compile(
            optimizer=keras.optimizers.AdamW(2e-5), mesh=mesh, layout=dew_keras.Layout(min_shard=1, tolerance=1.0)
        )
        return model.fit(tokens, batch_size=8, epochs=2, verbose=0).history

    got, want = history({"expert": 4, "fsdp": 2}), history({"data": 8})
    assert set(ROUTING_METRICS) < set(got)
    assert 1 <= got["expert_load_max"][0] <= 2
    for name, values in want.items():
        assert got[name] == pytest.approx(values, rel=1e-4), name
