"""The delta rule on a mesh is the delta rule on one device, and sends what its docstring says."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dew.parallel.delta_scan import Gates, convolve_and_correct, sharded_convolve_and_correct
from dew.parallel.ssm_scan import Streams
from dew.placement.layout import LayoutRefused
from dew.placement.mesh import MeshSpec, build_mesh
from tests.tools.test_collectives import tool

B, T, G, R, H, P, W = 4, 48, 2, 2, 3, 5, 4
MESHES = {
    "sequence=2 tensor=2 fsdp=2": MeshSpec(sequence=2, tensor=2, fsdp=2),
    "sequence=4 tensor=2": MeshSpec(sequence=4, tensor=2),
    "sequence=8": MeshSpec(sequence=8),
}


@functools.cache
def inputs():
    """Arguments and the documents of a packed batch: borders on those of slices, one after, one before, none at all."""
    generator = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(generator.standard_normal(shape), jnp.float32)

    streams = Streams(draw(B, T, G, R * H), draw(B, T, G, P), draw(B, T, G, P))
    taps = Streams(draw(G, R * H, W), draw(G, P, W), draw(G, P, W))
    # Slow decays: what the first slice leaves must reach the last one.
    gates = Gates(-jnp.exp(draw(B, T, G, R) - 4.0), jax.nn.sigmoid(draw(B, T, G, R)))
    starts = np.zeros((B, T), bool)
    starts[0, [6, 12, 24, 36]] = starts[1, [13, 25]] = starts[2, [23, 47]] = True
    return (streams, gates, taps), jnp.asarray(starts), draw(B, T, G, R * H)


def gradients(rule):
    arguments, starts, weight = inputs()

    def loss(arguments):
        y = rule(*arguments, activation=jax.nn.silu, starts=starts)[0]
        return jnp.sum(weight * y), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(arguments)


@functools.cache
def on_one_device():
    return jax.device_get(gradients(convolve_and_correct))


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_computes_what_one_device_does(name):
    with jax.set_mesh(build_mesh(MESHES[name])):
        rule = functools.partial(sharded_convolve_and_correct, jax.sharding.get_abstract_mesh())
        (_, y), got = gradients(rule)
    (_, want_y), want = on_one_device()
    for ours, theirs in zip(jax.tree.leaves((y, got)), jax.tree.leaves((want_y, want)), strict=True):
        scale = np.abs(theirs).max()
        assert scale > 0
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name, slices", [("sequence=2 tensor=2 fsdp=2", 2), ("sequence=8", 8)])
def test_the_shifts_are_those_of_the_docstring(name, slices):
    mesh = build_mesh(MESHES[name])
    shape = dict(mesh.shape)
    arguments, starts, _ = inputs()
    with jax.set_mesh(mesh):
        abstract = jax.sharding.get_abstract_mesh()
        run = jax.jit(
            lambda streams, gates, taps, starts: sharded_convolve_and_correct(
                abstract, streams, gates, taps, activation=jax.nn.silu, starts=starts
            )[0],
            out_shardings=NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "sequence", "tensor")),
        )
        text = run.lower(*arguments, starts).compile().as_text()
    found = [item for item in tool.collectives(text, shape) if "sequence" in item.axes]
    assert {item.kind for item in found} == {"collective-permute"}
    rounds = math.ceil(math.log2(slices - 1)) + 1
    rows, keys = B // (shape["data"] * shape["fsdp"]), G // shape["tensor"]
    halo, state = (W - 1) * (R * H + 2 * P), R * (H + P) * P
    assert sum(item.executions for item in found) == 1 + rounds
    assert sum(item.step_bytes for item in found) == 4 * rows * keys * (halo + rounds * state)


def test_the_mesh_refuses_before_it_computes():
    (streams, gates, taps), _, _ = inputs()
    cut = [jax.tree.map(lambda leaf: leaf[:, :39], each) for each in (streams, gates)]
    with jax.set_mesh(build_mesh(MeshSpec(sequence=8))):
        rule = functools.partial(sharded_convolve_and_correct, jax.sharding.get_abstract_mesh())
        with pytest.raises(LayoutRefused, match=r"Layers with a state on sequence=8 .* nearest such length is 40"):
            rule(*cut, taps, activation=jax.nn.silu)
