"""The token loss on a mesh is the plain cross entropy; logits stay where they are made."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dew.parallel.table_copies import copied_token_loss, copies_of
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


HEAD = {"softcap": 3.0, "scale": 0.7}


def plain(hidden, head, targets, weights):
    logits = HEAD["softcap"] * jnp.tanh(HEAD["scale"] * hidden @ head.T / HEAD["softcap"])
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


def on_mesh(hidden, head, targets, weights):
    return sharded_token_loss(jax.sharding.get_abstract_mesh(), hidden, head, targets, weights, **HEAD)


def with_copies(hidden, head, targets, weights):
    mesh = jax.sharding.get_abstract_mesh()
    return copied_token_loss(mesh, hidden, copies_of(mesh, head, targets.shape), targets, weights, **HEAD)


def program(loss=on_mesh):
    """Differentiate a part of the loss: what is behind it must reach its gradients as a factor."""

    def part(hidden, head, targets, weights):
        total, *further = loss(hidden, head, targets, weights)
        return 0.25 * total, further

    return jax.jit(jax.value_and_grad(part, (0, 1), has_aux=True))


def assert_plain(got, gradients, alone):
    (want, want_further), want_gradients = program(plain)(*inputs())
    np.testing.assert_allclose(got[0], want, rtol=1e-6)
    np.testing.assert_allclose(got[1], want_further, rtol=1e-6)
    np.testing.assert_allclose(alone, (4 * want, *want_further), rtol=1e-6)
    for gradient, expected in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-6 * float(jnp.max(jnp.abs(expected))))


@pytest.mark.parametrize("spec", MESHES, ids=str)
def test_values_and_gradients_are_those_of_the_plain_cross_entropy(spec):
    mesh = build_mesh(spec)
    with jax.set_mesh(mesh):
        assert_plain(*program()(*placed(mesh)), jax.jit(on_mesh)(*placed(mesh)))


def test_a_head_that_every_device_copies_gives_the_same():
    mesh = build_mesh(MeshSpec(fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        assert_plain(*program(with_copies)(*placed(mesh)), jax.jit(with_copies)(*placed(mesh)))


@pytest.mark.parametrize("spec", MESHES, ids=str)
def test_only_the_head_its_gradient_and_sums_travel(spec):
    mesh = build_mesh(spec)
    with jax.set_mesh(mesh):
        text = program().lower(*placed(mesh)).compile().as_text()
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
        _, (_, by_head) = program()(*arguments)
    assert by_head.sharding.is_equivalent_to(arguments[1].sharding, 2)
    assert by_head.sharding.spec != PartitionSpec()


def test_without_a_mesh_it_is_the_loss_of_one_device():
    np.testing.assert_allclose(sharded_token_loss(None, *inputs(), **HEAD)[0], plain(*inputs())[0], rtol=1e-6)
