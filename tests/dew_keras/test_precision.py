"""Dtype policies for any module: Keras' dtypes and numbers, and its loss scale."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import dew_keras
from tests.dew_keras.nets import Linear, Regularised, kernel, rows
from tests.tiny import tiny_batch, tiny_decoder

# Keras reads its variables in a way that numpy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
POLICIES = {"float32": 1e-5, "mixed_float16": 1e-3, "mixed_bfloat16": 5e-3, "bfloat16": 1e-2}
MESH = {"data": 8}


def model_of(dtype, optimizer, mesh=MESH, **options):
    weight, bias = kernel()
    model = dew_keras.Model(Linear(), variables={"params": {"dense": {"kernel": weight, "bias": bias}}})
    model.compile(optimizer, "mse", dtype=dtype, mesh=mesh, **options)
    return model


def keras_model_of(policy, optimizer):
    weight, bias = kernel()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, dtype=policy)])
    model.dtype_policy = keras.DTypePolicy(policy)
    model.set_weights([weight, bias])
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_gives_the_dtypes_and_numbers_of_keras(policy):
    x, y, _ = rows(16)
    ours = model_of(keras.DTypePolicy(policy), keras.optimizers.SGD(0.1))
    theirs = keras_model_of(policy, keras.optimizers.SGD(0.1))
    got, want = ours.predict(x, verbose=0), theirs.predict(x, verbose=0)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got.astype("float32"), want.astype("float32"), rtol=POLICIES[policy])
    losses = [m.fit(x, y, 8, 3, verbose=0, shuffle=False).history["loss"] for m in (ours, theirs)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=POLICIES[policy])
    dense = ours.variables["params"]["dense"]
    for name, variable in zip(("kernel", "bias"), theirs.weights, strict=True):
        assert str(dense[name].dtype) == variable.dtype
        np.testing.assert_allclose(
            np.asarray(dense[name], "float32"), np.asarray(variable.value, "float32"), atol=POLICIES[policy]
        )
    assert type(ours.optimizer) is type(theirs.optimizer)


def test_the_loss_scale_follows_keras():
    x, y, _ = rows(16)
    spiked = x.copy()
    spiked[8] = 30000.0  # its gradient overflows float16 whatever the scale
    models = []
    for make in (model_of, keras_model_of):
        scaled = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.1), initial_scale=2.0**10, dynamic_growth_steps=3
        )
        model = make("mixed_float16", scaled)
        for data in (x, x, x, x):
            model.train_on_batch(data, y)
        before = [np.asarray(leaf) for leaf in model.get_weights()]
        model.train_on_batch(spiked, 1e6 * y)
        models.append(model)
        for now, then in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(now, then)
    ours, theirs = models
    state = ours._engine.state.opt_state
    assert float(state.scale) == float(theirs.optimizer.dynamic_scale) == 2.0**10
    assert int(state.finite_batches) == int(theirs.optimizer.step_counter) == 0
    assert int(ours.optimizer.iterations) == int(theirs.optimizer.iterations) == 4
    weights = [sorted(map(np.asarray, m.get_weights()), key=np.size) for m in models]
    for got, want in zip(*weights, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-3)


@pytest.mark.parametrize("auto_scale_loss", [True, False])
def test_the_loss_is_scaled_where_keras_scales_it(auto_scale_loss):
    x, y, _ = rows(8)
    for dtype in ("mixed_float16", "mixed_bfloat16"):
        for optimizer in (keras.optimizers.SGD(0.1), optax.sgd(0.1)):
            model = model_of(dtype, optimizer, auto_scale_loss=auto_scale_loss)
            loss = model.train_on_batch(x, y)
            is_scaled = hasattr(model._engine.state.opt_state, "scale")
            assert is_scaled == (auto_scale_loss and dtype == "mixed_float16")
            assert loss == pytest.approx(3.50, rel=0.01), "what is reported is never scaled"


def test_a_static_factor_changes_no_number():
    x, y, _ = rows(8)
    models = [model_of("auto", keras.optimizers.Adam(0.1, loss_scale_factor=factor)) for factor in (None, 512.0)]
    losses = [model.fit(x, y, 8, 3, 0, shuffle=False).history["loss"] for model in models]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for got, want in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_turning_the_loss_scale_on_keeps_the_moments():
    x, y, _ = rows(8)
    optimizer = keras.optimizers.Adam(0.1)
    model = model_of("auto", optimizer)
    model.train_on_batch(x, y)
    for dtype, count in (("mixed_float16", 2), ("float32", 3)):
        model.compile(optimizer, "mse", dtype=dtype, mesh=MESH)
        model.train_on_batch(x, y)
        kept = model._engine.state.opt_state
        assert hasattr(kept, "scale") == (dtype == "mixed_float16")
        assert int((kept.inner if hasattr(kept, "scale") else kept).count) == count


def test_batch_statistics_stay_in_float32():
    x, y, _ = rows(16)
    found = []
    for dtype in ("mixed_bfloat16", "auto"):
        model = dew_keras.Model(Regularised())
        model.compile("sgd", "mse", dtype=dtype, mesh=MESH)
        model.fit(x, y, 8, 2, 0, shuffle=False)
        statistics = model.variables["batch_stats"]
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(statistics)} == {"float32"}
        found.append(statistics)
    assert model.predict(x, verbose=0).dtype == np.float32
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-2), *found)


class Looked(nn.Module):
    """An embedding, whose inputs are integers."""

    @nn.compact
    def __call__(self, ids):
        """Look rows up."""
        assert jnp.issubdtype(ids.dtype, jnp.integer)
        return nn.Dense(2)(nn.Embed(300, 4)(ids))


def test_metrics_are_computed_in_float32():
    def exact(y, y_pred):
        return jnp.mean(jnp.abs(y.astype(jnp.float32) - y_pred.astype(jnp.float32)), axis=-1)

    x, y, _ = rows(64)
    model = model_of("mixed_bfloat16", "sgd", metrics=["mae", exact])
    logs = model.evaluate(x, y, 64, verbose=0, return_dict=True)
    assert logs["mae"] == pytest.approx(logs["exact"], rel=1e-6)


def test_integers_are_not_cast():
    model = dew_keras.Model(Looked())
    model.compile("sgd", "mse", dtype="mixed_bfloat16", mesh=MESH)
    ids = np.asarray([257, 259] * 4)  # bfloat16 does not tell them apart
    out = model.predict(ids, verbose=0)
    assert out.dtype.name == "bfloat16"
    assert np.abs(out[0].astype("float32") - out[1].astype("float32")).max() > 1e-3


def test_a_language_model_under_a_keras_loss_trains_weights_of_the_policy():
    tokens = tiny_batch(rows=8, length=4)["tokens"]
    model = dew_keras.Model(tiny_decoder(num_layers=1))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), dtype="bfloat16", mesh=MESH)
    model.fit(tokens[:, :-1], tokens[:, 1:], batch_size=8, verbose=0)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model.variables)} == {"bfloat16"}


def test_a_language_model_refuses_float16_by_name():
    model = dew_keras.Model(tiny_decoder())
    with pytest.raises(ValueError, match=r"mixed_float16.*Use dtype='mixed_bfloat16'"):
        model.compile(dtype="mixed_float16")
    assert not model.compiled


@pytest.mark.parametrize("dtype", ["float16", "int8", keras.dtype_policies.QuantizedDTypePolicy("int8", "float32")])
def test_other_policies_are_refused(dtype):
    with pytest.raises(ValueError, match=r"Unknown dtype name.*Received: dtype='(float16|int8)"):
        model_of(dtype, "sgd")


class OwnStep(dew_keras.Model):
    """A step of its own around the inherited one."""

    def train_step(self, state, data):
        """Run the inherited step."""
        return super().train_step(state, data)


def test_a_step_of_the_users_own_scales_its_loss_too():
    x, y, _ = rows(8)
    found = []
    for kind in (dew_keras.Model, OwnStep):
        weight, bias = kernel()
        model = kind(Linear(), variables={"params": {"dense": {"kernel": weight, "bias": bias}}})
        model.compile(keras.optimizers.SGD(0.1), "mse", dtype="mixed_float16", mesh=MESH)
        losses = [model.train_on_batch(x, y) for _ in range(3)]
        before = [np.asarray(leaf) for leaf in model.get_weights()]
        model.train_on_batch(1e4 * x, y)
        for now, then in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(now, then)
        state = model._engine.state.opt_state
        found.append((losses, before, float(state.scale), int(state.inner.count)))
    assert found[0][2:] == found[1][2:] == (2.0**14, 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-3), found[0][:2], found[1][:2])
