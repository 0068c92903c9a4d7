"""The token loss on a mesh is the plain cross entropy; logits stay where they are made."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dew.parallel.vocabulary import sharded_token_loss
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.rules import DEFAULT_RULES, resolve

B, T, D, V = 8, 12, 16, 40
MESHES = [
    MeshSpec(),
    MeshSpec(fsdp=8),
    MeshSpec(tensor=4),
    MeshSpec(tensor=8),  # 12 positions do not divide: every tensor shard scores them all
    MeshSpec(fsdp=2, tensor=2),
    MeshSpec(fsdp=2, tensor=4),
]


@functools.cache
def inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, head = jax.random.normal(keys[0], (B, T, D)), jax.random.normal(keys[1], (V, D))
    targets = jax.random.randint(keys[2], (B, T), 0, V)
    weights = (jax.random.uniform(keys[3], (B, T)) < jnp.linspace(0, 1, B)[:, None]).astype(jnp.float32)
    return hidden, head, targets, weights


def plain(hidden, head, targets, weights):
    logits = hidden @ head.T
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return jnp.sum(losses * weights), jnp.sum((jnp.argmax(logits, axis=-1) == targets) * weights), jnp.sum(weights)


def placed(mesh):
    hidden, head, targets, weights = inputs()
    named = lambda *names: lambda x: NamedSharding(mesh, resolve(names, x.shape, mesh, DEFAULT_RULES).spec)  # noqa: E731
    rows = named("activation_batch", None)
    return (
        jax.device_put(hidden, named("activation_batch", None, None)(hidden)),
        jax.device_put(head, named("vocab", "embed")(head)),
        jax.device_put(targets, rows(targets)),
        jax.device_put(weights, rows(weights)),
    )


def program(mesh):
    def loss(hidden, head, targets, weights):
        total, *further = sharded_token_loss(jax.sharding.get_abstract_mesh(), hidden, head, targets, weights)
        return total, further

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@pytest.mark.parametrize("spec", MESHES, ids=str)
def test_values_and_gradients_are_those_of_the_plain_cross_entropy(spec):
    mesh = build_mesh(spec)
    with jax.set_mesh(mesh):
        (loss, (correct, mass)), gradients = program(mesh)(*placed(mesh))
        alone = jax.jit(lambda *x: sharded_token_loss(jax.sharding.get_abstract_mesh(), *x))(*placed(mesh))
    (want, (want_correct, want_mass)), want_gradients = jax.value_and_grad(
        lambda *x: (plain(*x)[0], plain(*x)[1:]), (0, 1), has_aux=True
    )(*inputs())
    np.testing.assert_allclose([loss, alone[0]], [want, want], rtol=1e-6)
    np.testing.assert_allclose([correct, alone[1]], [want_correct] * 2, rtol=1e-6)
    np.testing.assert_allclose([mass, alone[2]], [want_mass] * 2, rtol=1e-6)
    for got, gradient in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(got, gradient, rtol=0, atol=1e-6 * float(jnp.max(jnp.abs(gradient))))


@pytest.mark.parametrize("spec", MESHES, ids=str)
def test_only_the_head_its_gradient_and_sums_travel(spec):
    mesh = build_mesh(spec)
    with jax.set_mesh(mesh):
        text = program(mesh).lower(*placed(mesh)).compile().as_text()
    travelling = re.findall(r"= (.*?) (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(", text)
    shapes = [
        tuple(map(int, dims.split(","))) if dims else ()
        for dims in re.findall(r"f32\[([\d,]*)\]", " ".join(travelling))
    ]
    # What a device may send or get: the head, its gradient, in whole or in parts, and scalars.
    parts = {V * D // part for part in (1, 2, 4, 8)} | {1}
    assert shapes
    assert {int(np.prod(shape)) for shape in shapes} <= parts
    rows_of_logits = [shape for shape in shapes if shape[-1:] == (V,)]
    assert rows_of_logits == []


@pytest.mark.parametrize("spec", [MeshSpec(fsdp=8), MeshSpec(fsdp=2, tensor=4)], ids=str)
def test_the_gradient_by_the_head_arrives_in_the_heads_parts(spec):
    mesh = build_mesh(spec)
    arguments = placed(mesh)
    with jax.set_mesh(mesh):
        _, (_, by_head) = program(mesh)(*arguments)
    assert by_head.sharding.is_equivalent_to(arguments[1].sharding, 2)
    assert by_head.sharding.spec != PartitionSpec()


def test_without_a_mesh_it_is_the_loss_of_one_device():
    np.testing.assert_allclose(sharded_token_loss(None, *inputs())[0], plain(*inputs())[0], rtol=1e-6)
