"""Pins and gathers in the compiled program: there under a mesh, absent without one, no gathered weight kept."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from dew.nn.linear import Linear
from dew.nn.remat import checkpointed
from dew.nn.sharding import constrain, gather_weights, gathers_weights
from dew.placement.mesh import MeshSpec, build_mesh

NAMES = ("activation_batch", "activation_length", "activation_mlp")


def pins(function, *arguments):
    return jax.jit(function).lower(*arguments).as_text().count("sharding_constraint")


def test_a_pin_needs_a_mesh_in_context():
    x = jnp.ones((8, 4, 16))
    assert pins(lambda x: constrain(x, NAMES), x) == 0
    with jax.set_mesh(build_mesh(MeshSpec(tensor=2))):
        assert pins(lambda x: constrain(x, NAMES), x) == 1
    with jax.set_mesh(build_mesh(MeshSpec(), jax.devices()[:1])):
        assert pins(lambda x: constrain(x, NAMES), x) == 0


@pytest.mark.parametrize(
    "shape, spec",
    [
        ((8, 4, 16), PartitionSpec(("data", "fsdp"), None, "tensor")),
        ((2, 4, 16), PartitionSpec("data", None, "tensor")),  # 2 rows do not divide data * fsdp
        ((8, 4, 15), PartitionSpec(("data", "fsdp"))),  # 15 does not divide tensor
    ],
)
def test_a_pin_follows_the_rules_and_their_fallbacks(shape, spec):
    mesh = build_mesh(MeshSpec(fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x, NAMES))(jnp.ones(shape))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)


def test_changed_rules_move_activations():
    mesh = build_mesh(MeshSpec(fsdp=2, tensor=4))
    rules = (("activation_batch", "data"), ("activation_length", "tensor"), ("activation_mlp", None))
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        y = jax.jit(lambda x: constrain(x, NAMES))(jnp.ones((8, 4, 16)))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(None, "tensor")), 3)


def test_axes_that_a_shard_map_holds_are_left_alone():
    mesh = build_mesh(MeshSpec(fsdp=4, tensor=2))
    spec = PartitionSpec(("data", "fsdp"), None, "tensor")

    def local(x):
        return constrain(x, NAMES) * 2

    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(run)(jnp.ones((8, 4, 16))), 2 * np.ones((8, 4, 16)))


def test_every_dimension_is_named():
    with pytest.raises(ValueError, match=r"name per dimension of \(8, 4\). Received: names=\('activation_batch',\)"):
        constrain(jnp.ones((8, 4)), ("activation_batch",))


def test_a_weight_needs_a_name_for_each_dimension():
    layer = Linear((4,), (6,), ("embed",), (), False)
    with pytest.raises(ValueError, match=r"weight 'kernel' of shape \(4, 6\) needs 2 logical names\. Received: names="):
        layer.init(jax.random.key(0), jnp.ones((1, 4)))


def test_a_weight_of_another_shape_is_refused_with_its_path():
    layer = Linear((4,), (6,), ("embed",), ("mlp",))
    with pytest.raises(ValueError, match=r"weight 'kernel' must have shape \(4, 6\). Received: shape=\(4, 5\)"):
        layer.apply({"params": {"kernel": jnp.ones((4, 5))}}, jnp.ones((1, 4)))


L, D, F, ROWS = 3, 32, 64, 8
WEIGHTS = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}


def layers_loss(weights, x):
    def block(x, layer):
        ready = gather_weights(layer, WEIGHTS)
        return x + jnp.tanh(x @ ready["up"]) @ ready["down"], None

    return jnp.sum(jax.lax.scan(checkpointed(block, None, in_loop=True), x, weights)[0] ** 2)


def layers(mesh=None):
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {"up": jax.random.normal(keys[0], (L, D, F)) * 0.1, "down": jax.random.normal(keys[1], (L, F, D)) * 0.1}
    x = jax.random.normal(keys[2], (ROWS, D))
    if mesh is None:
        return weights, x
    specs = {"up": PartitionSpec(None, "fsdp"), "down": PartitionSpec(None, None, "fsdp")}
    placed = {name: jax.device_put(weights[name], NamedSharding(mesh, spec)) for name, spec in specs.items()}
    return placed, jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp")))


def test_gathered_weights_change_no_gradient_and_are_not_kept():
    mesh = build_mesh(MeshSpec(fsdp=8))
    with jax.set_mesh(mesh):
        assert gathers_weights()
        arguments = layers(mesh)
        got = jax.jit(jax.grad(layers_loss))(*arguments)
        text = jax.jit(jax.grad(layers_loss)).lower(*arguments).compile().as_text()
    want = jax.grad(layers_loss)(*layers())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
    for name, leaf in got.items():
        assert leaf.sharding.is_equivalent_to(arguments[0][name].sharding, 3), f"{name} left its parts"
    # Two gathers forward and two backward, and no stack of gathered weights between the two loops.
    assert len(re.findall(r"= \S+ all-gather\(", text)) == 4
    assert not re.search(rf"f32\[{L},({D},{F}|{F},{D})\]", text)


def test_without_fsdp_nothing_is_gathered():
    assert not gathers_weights()
    with jax.set_mesh(build_mesh(MeshSpec(tensor=8))):
        assert not gathers_weights()
        weights = {"up": jnp.ones((D, F)), "down": jnp.ones((F, D))}
        found = gather_weights(weights, WEIGHTS)
        assert all(found[name] is leaf for name, leaf in weights.items())
