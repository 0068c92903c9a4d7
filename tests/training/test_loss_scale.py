"""Loss scaling moves nothing but the range: same updates, no update where a gradient overflows."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dew.objectives.base import LossOutput, Ratio
from dew.placement.mesh import MeshSpec, build_mesh
from dew.training.loss_scale import dynamic_loss_scale, static_loss_scale
from dew.training.optimizer import as_step_transformation, make_optimizer
from dew.training.trainer import Trainer


class Weight(nn.Module):
    """One weight per input."""

    @nn.compact
    def __call__(self, x):
        """Multiply in the dtype of the input."""
        return x * self.param("w", nn.initializers.ones, (x.shape[-1],)).astype(x.dtype)


class Narrow:
    """Sums `x * w` over the rows; the gradient of `w` passes through a dtype."""

    def __init__(self, dtype="float16", gain=1.0):
        self.module = Weight()
        self.dtype = dtype
        self.gain = gain

    def init(self, key):
        return self.module.init(key, jnp.zeros((1, 4)))

    def prepare(self, batch):
        return dict(batch)

    def loss(self, variables, batch, *, key, train):
        y = self.module.apply(variables, batch["x"].astype(self.dtype))
        losses = self.gain * y.astype(jnp.float32).mean(-1)
        return LossOutput(Ratio(jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"])))

    def report(self, statistics):
        return {name: ratio.value() for name, ratio in statistics.items()}


def rows(value, count=8, weight=1.0):
    return {"x": np.full((count, 4), value, "float32"), "weight": np.full(count, weight, "float32")}


def build(optimizer, dtype="float16", devices=1, gain=1.0, **options):
    return Trainer(Narrow(dtype, gain), optimizer, mesh=build_mesh(MeshSpec(), jax.devices()[:devices]), **options)


def after(run, batches):
    loop = run.loop(run.place())
    results = [loop.step(batch) for batch in batches]
    loop.drain()
    return [result.read()["loss"].value() for result in results], jax.device_get(loop.state)


@pytest.fixture(scope="module")
def scaled():
    """A run whose scale doubles after three updates."""
    return build(dynamic_loss_scale(make_optimizer("adam", 0.1), initial_scale=2.0**14, growth_batches=3))


def test_gradients_that_vanish_in_a_narrow_dtype_come_back():
    # float16 ends at 6e-8; what reaches it here is 1e-8 / 4.
    batch, gain, rate = rows(2.0), 1e-8, 1e7
    _, plain = after(build(make_optimizer("sgd", rate), gain=gain), [batch])
    np.testing.assert_array_equal(plain.params["w"], 1.0)
    losses, got = after(build(dynamic_loss_scale(make_optimizer("sgd", rate)), gain=gain), [batch])
    np.testing.assert_allclose(got.params["w"], 1 - rate * gain * 2.0 / 4, rtol=1e-2)
    assert losses[0] == pytest.approx(2e-8, rel=1e-3), "reported losses are not scaled"


def test_a_rejected_update_leaves_weights_and_moments_and_halves_the_scale(scaled):
    good, overflowing = rows(1.0), rows(200.0)
    _, before = after(scaled, [good])
    losses, state = after(scaled, [good, overflowing])
    assert np.isfinite(losses[1]), "the loss itself is finite: only its scaled gradient is not"
    assert (before.opt_state.scale, before.opt_state.finite_batches) == (2.0**14, 1)
    assert (state.opt_state.scale, state.opt_state.finite_batches) == (2.0**13, 0)
    jax.tree.map(np.testing.assert_array_equal, state.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.inner, before.opt_state.inner)
    assert (int(state.step), int(state.updates)) == (2, 1)


def test_the_scale_doubles_after_finite_updates(scaled):
    for updates, want in ((2, (2.0**14, 2)), (3, (2.0**15, 0)), (4, (2.0**15, 1))):
        _, state = after(scaled, [rows(1.0)] * updates)
        assert (state.opt_state.scale, state.opt_state.finite_batches) == want
        assert int(state.updates) == updates


def test_a_batch_without_weight_is_no_overflow(scaled):
    _, state = after(scaled, [rows(1.0), rows(1.0, weight=0.0)])
    assert (state.opt_state.scale, state.opt_state.finite_batches, int(state.updates)) == (2.0**14, 1, 1)


@pytest.mark.parametrize("devices", [1, 4])
def test_in_float32_scaling_changes_nothing(devices):
    batches = [rows(1.0), rows(3.0, weight=0.5)]
    _, want = after(build(make_optimizer("adam", 0.1), "float32"), batches)
    for optimizer in (
        static_loss_scale(make_optimizer("adam", 0.1), 128.0),
        dynamic_loss_scale(make_optimizer("adam", 0.1)),
    ):
        _, got = after(build(optimizer, "float32", devices), batches)
        np.testing.assert_allclose(got.params["w"], want.params["w"], rtol=1e-6)


def test_the_range_does_not_depend_on_the_rows_of_a_batch():
    # The mean is scaled: a total over 64 rows of the same size would overflow.
    run = build(dynamic_loss_scale(make_optimizer("sgd", 0.1), initial_scale=2.0**14))
    for count in (8, 64):
        _, state = after(run, [rows(8.0, count)])
        assert int(state.updates) == 1
        np.testing.assert_allclose(state.params["w"], 1 - 0.1 * 2.0, rtol=1e-3)


def test_a_window_counts_its_batches_and_is_rejected_whole():
    optimizer = dynamic_loss_scale(make_optimizer("sgd", 0.1), initial_scale=2.0**14, growth_batches=3, window=2)
    run = build(optimizer, accumulation=2)
    _, state = after(run, [rows(1.0)] * 4)
    assert (state.opt_state.scale, state.opt_state.finite_batches, int(state.updates)) == (2.0**15, 1, 2)
    _, state = after(run, [rows(1.0), rows(200.0), rows(1.0)])
    np.testing.assert_array_equal(state.params["w"], 1.0)
    assert (state.opt_state.scale, int(state.updates), int(state.microstep)) == (2.0**13, 0, 1)


def test_batches_of_a_window_weigh_the_same_where_the_optimizer_says_so():
    batches = [rows(1.0), rows(9.0, count=24)]
    for averages, mean in ((False, (8 * 1 + 24 * 9) / 32), (True, 5.0)):
        optimizer = as_step_transformation(optax.sgd(0.1))._replace(averages_batches=averages)
        _, state = after(build(optimizer, "float32", accumulation=2), batches)
        np.testing.assert_allclose(state.params["w"], 1 - 0.1 * mean / 4, rtol=1e-6)


def test_a_scale_must_be_positive():
    with pytest.raises(ValueError, match="factor=0"):
        static_loss_scale(optax.sgd(0.1), 0)
    with pytest.raises(ValueError, match="growth_batches=0"):
        dynamic_loss_scale(optax.sgd(0.1), growth_batches=0)
