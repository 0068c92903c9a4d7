"""Balance biases follow the sign of what a whole update counted, and only a rate of their own moves them."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dew.nn.moe import ExpertsSpec
from dew.nn.router import RouterSpec, RouterTraining
from dew.objectives.language import LanguageModel
from dew.placement.mesh import MeshSpec, build_mesh
from dew.training.loss_scale import static_loss_scale
from dew.training.optimizer import as_step_transformation, make_optimizer
from dew.training.placing import plain
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer

EXPERTS = ExpertsSpec(
    num_experts=3, features=32, router=RouterSpec(top_k=1, score="sigmoid", normalise=True, balance_bias=True)
)
RATE = 0.01
SGD = make_optimizer("sgd", 0.1)
ROWS, LENGTH = 6, 12
TOKENS = tiny_batch(rows=ROWS, length=LENGTH)["tokens"]


def decoder(bias_rate=RATE, **fields):
    layers = (dataclasses.replace(tiny_layer(), mlp=EXPERTS),) * 2
    return tiny_decoder(layers=layers, router_training=RouterTraining(bias_rate=bias_rate), **fields)


@functools.cache
def weights():
    """Draw weights whose routers are decided, so that rounding does not change a choice."""
    drawn = plain(LanguageModel(decoder()).init(jax.random.key(4)))
    enlarge = lambda path, leaf: leaf * 50 if path[-2].key == "router" else leaf  # noqa: E731
    return jax.device_get(jax.tree_util.tree_map_with_path(enlarge, drawn))


@functools.cache
def chosen():
    """Give the expert of each token in each layer, [rows, T, layers]."""
    variables = weights()

    def loads(counted):
        _, routing = decoder().apply(variables, TOKENS[:, :-1], counted, method="routed_hidden_states")
        return jnp.stack([jnp.argmax(each.load) for each in routing])

    each_token = jnp.eye(ROWS * LENGTH).reshape(-1, ROWS, LENGTH)
    return np.asarray(jax.jit(lambda counted: jax.lax.map(loads, counted))(each_token)).reshape(ROWS, LENGTH, 2)


def scoring(*places):
    mask = np.zeros(TOKENS.shape, bool)
    for row, token in places:
        mask[row, token + 1] = True
    return {"tokens": TOKENS, "loss_mask": mask}


@functools.cache
def uneven_parts():
    """Give two batches that load the experts of every layer 1, 1, 0 and 0, 0, 1 in some order.

    The rows that are scored in the first are even, those in the second odd: two microbatches have one each.
    """
    places = list(itertools.product(range(ROWS), range(LENGTH)))
    even, odd = ([place for place in places if place[0] % 2 == parity] for parity in (0, 1))
    for *pair, last in ((*pair, last) for pair in itertools.combinations(even, 2) for last in odd):
        if all(len(set(layer)) == 3 for layer in zip(*(chosen()[place] for place in (*pair, last)), strict=True)):
            return scoring(*pair), scoring(last)
    raise AssertionError("no three tokens have three experts in both layers")


def updated(run, batches):
    """Train one update on the batches: the variables before it and after it."""
    loop = run.loop(run.place(weights()))
    list(loop.run(batches))
    assert int(loop.state.updates) == 1
    return named_leaves(weights()), named_leaves(jax.device_get(loop.state.variables))


def trainer(batches, optimizer=SGD, mesh=MeshSpec(), devices=1, **fields):
    """Build a trainer that updates after so many batches."""
    built = build_mesh(mesh, jax.devices()[:devices])
    return Trainer(
        LanguageModel(decoder(**fields)), optimizer, mesh=built, microbatches=mesh.stage, accumulation=batches
    )


def steps(before, after):
    (path,) = (path for path in before if path.endswith("balance_bias"))
    return (after[path] - before[path]) / RATE


CASES = {
    "one device": {},
    "three devices": {"devices": 3},
    "a loss scale": {"optimizer": static_loss_scale(SGD, 1000.0)},
    "a mean of batches": {"optimizer": as_step_transformation(SGD)._replace(averages_batches=True)},
    "gpipe": {"mesh": MeshSpec(stage=2), "devices": 2},
    "1f1b": {"mesh": MeshSpec(stage=2), "devices": 2, "schedule": "1f1b", "remat": "full"},
    "1f1b and a loss scale": {
        "mesh": MeshSpec(stage=2),
        "devices": 2,
        "schedule": "1f1b",
        "optimizer": static_loss_scale(SGD, 1000.0),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_biases_stay_where_the_batches_of_a_window_load_all_experts_alike(case):
    first, second = uneven_parts()
    run = trainer(2, **CASES[case])
    np.testing.assert_array_equal(steps(*updated(run, [first, second])), 0)
    np.testing.assert_allclose(np.sort(steps(*updated(run, [first, first])), axis=1), [[-1, -1, 1]] * 2)


@pytest.mark.parametrize("case", ["gpipe", "1f1b"])
def test_biases_stay_where_the_microbatches_of_a_pipeline_load_all_experts_alike(case):
    first, second = uneven_parts()
    both = {"tokens": TOKENS, "loss_mask": first["loss_mask"] | second["loss_mask"]}
    run = trainer(1, **CASES[case])
    np.testing.assert_array_equal(steps(*updated(run, [both])), 0)
    np.testing.assert_allclose(np.sort(steps(*updated(run, [second])), axis=1), [[-1, 1, 1]] * 2)


class Halving:
    """An optimizer with optax's two methods and nothing else."""

    def init(self, params):
        return ()

    def update(self, gradients, state, params=None):
        return jax.tree.map(lambda leaf: -leaf / 2, params), state


def test_biases_move_beside_any_object_that_updates():
    first, _ = uneven_parts()
    before, after = updated(trainer(1, Halving()), [first])
    np.testing.assert_allclose(np.sort(steps(before, after), axis=1), [[-1, -1, 1]] * 2)
    for path, value in before.items():
        if not path.endswith("balance_bias"):
            np.testing.assert_allclose(after[path], value / 2, err_msg=path)


@pytest.mark.parametrize("bias_rate", [0.0, RATE])
def test_freezing_all_weights_leaves_biases_to_their_rate(bias_rate):
    first, _ = uneven_parts()
    before, after = updated(trainer(1, optax.set_to_zero(), bias_rate=bias_rate), [first])
    moves = {path for path, value in before.items() if np.any(after[path] != value)}
    assert moves == {path for path in before if path.endswith("balance_bias") and bias_rate}
