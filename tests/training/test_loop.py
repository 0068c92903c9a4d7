"""The loop: nothing waits for the newest step, the state can be read and assigned, bad input changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from dew.objectives.base import LossOutput, Ratio
from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout, LayoutRefused
from dew.placement.mesh import MeshSpec
from dew.placement.partition import WholeBatch
from dew.training.loop import Loop, NonFiniteLossError
from dew.training.optimizer import make_optimizer
from dew.training.report import Report
from dew.training.trainer import Trainer
from tests.tiny import tiny_batch, tiny_decoder


class Line(nn.Module):
    """y = w x, with a running count of the rows it has seen."""

    @nn.compact
    def __call__(self, x, train=False):
        seen = self.variable("counts", "rows", lambda: jnp.zeros(()))
        weight = self.param("weight", nn.initializers.ones, (2,))
        if train:
            seen.value = seen.value + x.shape[0]
        return x * weight[0] + weight[1]


class Squares:
    """Half the squared error, and a look at what the step hands over."""

    module = Line()

    def init(self, key):
        return self.module.init(key, jnp.zeros((1,)))

    def prepare(self, batch):
        return {name: np.asarray(value, np.float32) for name, value in batch.items()}

    def loss(self, variables, batch, *, key, train):
        y, changed = self.module.apply(variables, batch["x"], train=train, mutable=["counts"])
        total = jnp.sum(0.5 * (y - batch["y"]) ** 2)
        draw = jax.random.uniform(key)
        return LossOutput(Ratio(total, 1.0 * y.size), {"draw": Ratio(draw, 1.0)}, changed if train else {})

    def report(self, statistics):
        return {name: ratio.value() for name, ratio in statistics.items()}


def batch(scale=1.0):
    x = np.arange(8.0)
    return {"x": x, "y": scale * (2 * x + 1)}


def line_trainer(**options):
    return Trainer(Squares(), options.pop("optimizer", make_optimizer("sgd", 0.01)), **options)


def test_any_module_trains_and_its_collections_are_carried():
    run = line_trainer(optimizer=make_optimizer("sgd", 0.03), mesh=MeshSpec(fsdp=2))
    loop = run.loop(run.place())
    losses = [result.read()["loss"].value() for result in loop.run([batch()] * 60)]
    assert losses[-1] < 0.01 * losses[0]
    assert float(loop.state.variables["counts"]["rows"]) == 60 * 8
    evaluated = run.evaluate(loop.state.variables, [batch(), batch(0.0)])
    assert evaluated["loss"].mass == 16
    assert float(loop.state.variables["counts"]["rows"]) == 60 * 8


def test_every_step_has_its_own_random_key():
    run = line_trainer()
    draws = [result.read()["draw"].total for result in run.loop(run.place()).run([batch()] * 4)]
    again = [result.read()["draw"].total for result in run.loop(run.place()).run([batch()] * 4)]
    other = line_trainer(key=1)
    others = [result.read()["draw"].total for result in other.loop(other.place()).run([batch()] * 4)]
    assert len(set(draws)) == 4
    assert draws == again
    assert set(draws).isdisjoint(others)


def test_results_arrive_in_order_and_the_loop_waits_for_old_steps_only(monkeypatch):
    waited = []
    monkeypatch.setattr(Loop, "_retire", lambda self: waited.append((self._in_flight.popleft().step, self._step)))
    run = line_trainer()
    steps = [result.step for result in run.loop(run.place()).run([batch()] * 6)]
    assert steps == [1, 2, 3, 4, 5, 6]
    # Step 1 is waited for when step 3 is about to start, and so on; the rest when the data has ended.
    assert waited == [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 6)]


def test_a_step_is_traced_once_and_reads_nothing_back(monkeypatch):
    run = line_trainer()
    loop = run.loop(run.place())
    loop.step(batch())
    loop.drain()

    def read(*_):
        raise AssertionError("a step read an array back to the host")

    with monkeypatch.context() as patch:
        array = type(loop.state.step)
        patch.setattr(array, "_value", property(read))
        patch.setattr(array, "block_until_ready", read)
        with pytest.raises(AssertionError, match="read an array back"):
            float(loop.state.step)  # the guard works
        loop.step(batch())
        loop.step(batch())
    assert run._programs._update._cache_size() == 1


def test_the_state_can_be_replaced_between_steps():
    run = line_trainer()
    loop = run.loop(run.place())
    losses = []
    for result in loop.run([batch()] * 4):
        losses.append(result.read()["loss"].value())
        if result.step == 2:
            weights = {"weight": np.asarray([2.0, 1.0], np.float32)}
            loop.state = loop.state.replace(variables={**loop.state.variables, "params": weights})
        if result.step == 3:
            loop.state = loop.state.with_learning_rate(0.0)
    assert losses[1] > 1
    assert losses[2:] == [0.0, 0.0]
    assert float(loop.state.learning_rate) == 0.0
    assert loop.state.params["weight"].sharding.is_fully_replicated


def test_replaced_counters_are_taken_over():
    run = line_trainer(accumulation=2)
    loop = run.loop(run.place())
    loop.step(batch())
    loop.state = run.place()
    assert [result.step for result in loop.run([batch()] * 2)] == [1, 2]
    assert int(loop.state.updates) == 1


def test_a_loss_that_is_not_finite_leaves_the_last_good_weights_and_stops_the_run():
    run = line_trainer()
    loop = run.loop(run.place())
    list(loop.run([batch()]))
    good = jax.device_get(loop.state.variables)
    with pytest.raises(NonFiniteLossError, match=r"5 consecutive steps, the last one step 6 with nan"):
        list(loop.run([batch(np.nan)] * 9))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loop.state.variables), good)


def test_single_losses_that_are_not_finite_are_skipped():
    run = line_trainer()
    loop = run.loop(run.place())
    results = list(loop.run([batch(), *[batch(np.inf)] * 4, batch(), *[batch(np.inf)] * 4, batch()]))
    assert [bool(result.applied) for result in results] == [True, *[False] * 4, True, *[False] * 4, True]
    assert int(loop.state.updates) == 3


def test_a_window_with_a_loss_that_is_not_finite_updates_nothing_and_the_next_one_starts_clean():
    run = line_trainer(accumulation=2)
    loop = run.loop(run.place())
    good = jax.device_get(loop.state.variables)
    list(loop.run([batch(np.nan), batch()]))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loop.state.params), good["params"])
    assert [bool(result.applied) for result in loop.run([batch(), batch()])] == [False, True]
    assert int(loop.state.updates) == 1


def test_a_refused_batch_changes_nothing():
    run = Trainer(LanguageModel(tiny_decoder(num_layers=2)), "adamw")
    loop = run.loop(run.place())
    before = loop.state
    with pytest.raises(ValueError, match=r"6 global rows.*Use a batch of 8 rows"):
        loop.step(tiny_batch(rows=6))
    with pytest.raises(ValueError, match="0 global rows"):
        loop.step({"tokens": np.zeros((0, 17), np.int32)})
    with pytest.raises(ValueError, match="tokens"):
        loop.step({"token": np.ones((8, 5), int)})
    assert loop.state is before
    assert not before.step.is_deleted()
    assert loop.step(tiny_batch()).step == 1


def test_construction_touches_no_device():
    with pytest.raises(ValueError, match="Did you mean 'adamw'"):
        Trainer(LanguageModel(tiny_decoder()), "adamww")
    with pytest.raises(ValueError, match="accumulation must be a positive integer"):
        Trainer(LanguageModel(tiny_decoder()), "adamw", accumulation=0)
    run = Trainer(LanguageModel(tiny_decoder()), "adamw", mesh=MeshSpec(fsdp=3))
    with pytest.raises(ValueError, match="does not divide the 8"):
        run.mesh  # noqa: B018


def test_a_layout_that_replicates_too_much_is_refused_before_anything_is_made():
    layout = Layout(rules={"embed": None, "mlp": "tensor", "vocab": "tensor", "head_dim": None}, min_shard=1)
    run = Trainer(LanguageModel(tiny_decoder(num_layers=2)), "adamw", mesh=MeshSpec(fsdp=8), layout=layout)
    live = len(jax.live_arrays())
    with pytest.raises(LayoutRefused, match=r"fsdp=8, 100\.0%.*\n.*params/"):
        run.place()
    assert len(jax.live_arrays()) <= live  # fewer where earlier tests left garbage


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda values: values["params"].pop("norm"), r"missing for 1 variables: \['params/norm/scale'\]"),
        (lambda values: values["params"].update(nor=np.ones(3)), "no variable 'params/nor'"),
        (lambda values: values["params"]["norm"].update(scale=np.ones(3)), r"must have shape \(32,\).*\(3,\)"),
    ],
)
def test_values_that_do_not_fit_the_module_are_refused(change, message):
    run = Trainer(LanguageModel(tiny_decoder(num_layers=2)), "adamw")
    values = jax.device_get(run.place().variables)
    change(values)
    with pytest.raises(ValueError, match=message):
        run.place(values)


def test_given_values_are_placed_in_the_dtype_the_module_declares():
    run = Trainer(LanguageModel(tiny_decoder(num_layers=2)), "adamw", mesh=MeshSpec(fsdp=2))
    values = jax.device_get(run.place().variables)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), values)
    placed = run.place(half).variables
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float32)), jax.device_get(placed), half)
    assert {leaf.dtype for leaf in jax.tree.leaves(placed)} == {jnp.dtype("float32")}


def test_an_optimizer_that_keeps_the_parameters_can_be_donated():
    keeps = optax.GradientTransformation(
        lambda params: params, lambda updates, state, params: (jax.tree.map(lambda g: -0.01 * g, updates), state)
    )
    run = line_trainer(optimizer=keeps)
    loop = run.loop(run.place())
    assert len(list(loop.run([batch()] * 3))) == 3


def test_the_report_writes_pooled_numbers_without_waiting():
    run = line_trainer()
    lines = []
    report = Report(run.objective.report, every=2, total=3, write=lines.append, clock=iter(range(100)).__next__)
    results = list(run.loop(run.place()).run([batch()] * 3))
    want = [result.read()["loss"].value() for result in results]
    for result in results:
        report.add(result)
    report.finish()
    assert lines[0].startswith(f"step 2/3: loss: {(want[0] + want[1]) / 2:.4f} - ")
    assert lines[1].startswith(f"step 3/3: loss: {want[2]:.4f} - ")
    assert "500 ms/step" in lines[0]
    assert "667 ms/step" in lines[1], "all three steps: the second line began late"


def test_a_whole_batch_is_lowered_as_it_is_trained():
    trainer = line_trainer(mesh=MeshSpec(fsdp=8))
    rows = {name: value[:5] for name, value in batch().items()}
    for given in (batch(), WholeBatch(rows)):
        _, shapes = trainer.lower(given).args_info[0]
        assert shapes["x"].shape == given["x"].shape
    with pytest.raises(ValueError, match="divi"):
        trainer.lower(rows)
