"""How rows are grouped into batches and windows changes nothing: sums are divided once."""

import functools

import jax
import numpy as np
import pytest

from dew.objectives.language import LanguageModel
from dew.placement.mesh import MeshSpec, build_mesh
from dew.training.optimizer import make_optimizer
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.tiny import tiny_batch, tiny_decoder

ROWS = 8
RATE = 1000.0  # moves a weight far beyond its own rounding, so that moves compare like gradients


@functools.cache
def build(accumulation=1, optimizer=None, devices=1):
    return Trainer(
        LanguageModel(tiny_decoder(num_layers=2)),
        optimizer or make_optimizer("sgd", RATE),
        mesh=build_mesh(MeshSpec(), jax.devices()[:devices]),
        accumulation=accumulation,
    )


def split(batch, parts):
    rows = [np.array_split(value, parts) for value in batch.values()]
    return [dict(zip(batch, part, strict=True)) for part in zip(*rows, strict=True)]


def after(run, batches):
    loop = run.loop(run.place())
    losses = [result.read()["loss"] for result in loop.run(batches)]
    return losses, jax.device_get(loop.state)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("parts", [2, 4])
def test_a_window_equals_its_batches_in_one(parts, devices):
    batch = tiny_batch(rows=ROWS)
    whole, want = after(build(devices=devices), [batch])
    pieces, got = after(build(parts, devices=devices), split(batch, parts))
    assert sum(piece.mass for piece in pieces) == whole[0].mass
    assert len({piece.mass for piece in pieces}) > 1, "masks are equal: a mean of means would pass"
    assert sum(piece.total for piece in pieces) == pytest.approx(whole[0].total, rel=1e-6)
    start = named_leaves(jax.device_get(build().place().params))
    for path, weight in named_leaves(want.params).items():
        moved = weight - start[path]
        # A weight holds its step to the last place of the weight.
        atol = 1e-5 * np.abs(moved).max() + np.spacing(np.abs(weight).max())
        np.testing.assert_allclose(named_leaves(got.params)[path] - start[path], moved, rtol=0, atol=atol, err_msg=path)
    assert (int(got.step), int(got.microstep), int(got.updates)) == (parts, 0, 1)


def test_an_open_window_changes_no_weight():
    run = build(3)
    start = jax.device_get(run.place().params)
    _, state = after(run, split(tiny_batch(rows=ROWS), 4)[:2])
    jax.tree.map(np.testing.assert_array_equal, state.params, start)
    assert (int(state.step), int(state.microstep), int(state.updates)) == (2, 2, 0)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(state.accumulator.gradients)) > 0


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_evaluation_does_not_depend_on_the_batch_size(rows):
    run = build()
    batch = tiny_batch(rows=12)
    variables = run.place().variables
    whole = run.objective.report(run.evaluate(variables, [batch]))
    parts = run.objective.report(run.evaluate(variables, split(batch, 12 // rows)))
    assert parts == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_window_without_any_scored_token_updates_nothing(accumulation):
    run = build(accumulation, make_optimizer("adamw", 0.1, weight_decay=0.5))
    start = jax.device_get(run.place())
    batch = tiny_batch(rows=ROWS)
    batch["loss_mask"][:] = False
    _, state = after(run, [batch] * accumulation)
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (start.params, start.opt_state))
    assert (int(state.step), int(state.microstep), int(state.updates)) == (accumulation, 0, 0)


def test_padding_rows_change_nothing():
    batch = tiny_batch(rows=6)
    padded = {name: np.concatenate([value, np.zeros_like(value[:2])]) for name, value in batch.items()}
    losses, got = after(build(), [padded])
    want_losses, want = after(build(), [batch])
    assert losses[0].value() == pytest.approx(want_losses[0].value(), rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), got.params, want.params
    )


def test_the_update_follows_the_gradient_of_the_total_over_the_mass():
    run = build(2)
    batch = tiny_batch(rows=ROWS)
    objective = run.objective
    start = jax.device_get(run.place().variables)

    def mean(params):
        loss = objective.loss({"params": params}, objective.prepare(batch), key=jax.random.key(0), train=True).loss
        return loss.total / loss.mass

    _, state = after(run, split(batch, 2))
    moved = jax.tree.map(lambda new, old: (old - new) / RATE, state.params, start["params"])
    want = jax.device_get(jax.jit(jax.grad(mean))(start["params"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), moved, want)
