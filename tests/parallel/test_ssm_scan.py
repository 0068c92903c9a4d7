"""The scan on a mesh is the scan on one device, and sends what its docstring says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from dew.parallel.ssm_scan import (
    ScanWeights,
    Streams,
    check_length,
    convolve_and_scan,
    sharded_convolve_and_scan,
    shift_bytes,
)
from dew.placement.layout import LayoutRefused
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.rules import DEFAULT_RULES
from tests.tools.test_collectives import tool

B, T, N, H, P, W = 4, 48, 4, 3, 5, 4
MESHES = {
    "sequence=2": MeshSpec(sequence=2),
    "sequence=4 tensor=2": MeshSpec(sequence=4, tensor=2),
    "sequence=2 tensor=2 fsdp=2": MeshSpec(sequence=2, tensor=2, fsdp=2),
    "sequence=8": MeshSpec(sequence=8),
    "tensor=4": MeshSpec(tensor=4),
}


@functools.cache
def drawn(groups):
    """Arguments and the documents of a packed batch: borders on those of slices, one after, one before, none at all."""
    generator = np.random.default_rng(groups)

    def draw(*shape):
        return generator.standard_normal(shape).astype(np.float32)

    streams = Streams(draw(B, T, N, H), draw(B, T, groups, P), draw(B, T, groups, P))
    weights = ScanWeights(
        taps=Streams(draw(N, H, W), draw(groups, P, W), draw(groups, P, W)),
        biases=Streams(draw(N, H), draw(groups, P), draw(groups, P)),
        decay=-np.exp(np.linspace(-4.0, 0.0, N, dtype=np.float32)),
        skip=draw(N),
    )
    dt = np.exp(generator.uniform(-4, 0, (B, T, N))).astype(np.float32)
    starts = np.zeros((B, T), bool)
    starts[0, [6, 12, 24, 36]] = starts[1, [13, 25]] = starts[2, [23, 47]] = True
    return (streams, dt, weights), starts, draw(B, T, N, H)


def inputs(groups):
    """What was drawn as arrays of the mesh in context: kept ones would bring an earlier test's mesh along."""
    return jax.tree.map(jnp.asarray, drawn(groups))


def gradients(groups, scan):
    arguments, starts, weight = inputs(groups)

    def loss(arguments):
        y = scan(*arguments, activation=jax.nn.silu, starts=starts)[0]
        return jnp.sum(weight * y), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(arguments)


@functools.cache
def on_one_device(groups):
    return jax.device_get(gradients(groups, convolve_and_scan))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_computes_what_one_device_does(name, groups):
    mesh = build_mesh(MESHES[name])
    with jax.set_mesh(mesh):
        scan = functools.partial(sharded_convolve_and_scan, jax.sharding.get_abstract_mesh())
        (_, y), got = gradients(groups, scan)
    (_, want_y), want = on_one_device(groups)
    for ours, theirs in zip(jax.tree.leaves((y, got)), jax.tree.leaves((want_y, want)), strict=True):
        scale = np.abs(theirs).max()
        assert scale > 0
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize(
    "name, slices, shifts", [("sequence=2", 2, 2), ("sequence=4 tensor=2", 4, 4), ("sequence=8", 8, 5)]
)
def test_the_shifts_are_those_of_the_docstring(name, slices, shifts):
    mesh = build_mesh(MESHES[name])
    shape = dict(mesh.shape)
    arguments, starts, _ = inputs(1)
    with jax.set_mesh(mesh):
        abstract = jax.sharding.get_abstract_mesh()
        run = jax.jit(
            lambda streams, dt, weights, starts: sharded_convolve_and_scan(
                abstract, streams, dt, weights, activation=jax.nn.silu, starts=starts
            )[0],
            out_shardings=NamedSharding(mesh, PartitionSpec("data", "sequence", "tensor")),
        )
        text = run.lower(*arguments, starts).compile().as_text()
    found = [item for item in tool.collectives(text, shape) if "sequence" in item.axes]
    assert {item.kind for item in found} == {"collective-permute"}
    sizes = {"head_dim": H, "groups": 1, "state_size": P, "taps": W, "itemsize": 4}
    count, size = shift_bytes(slices, rows=B // shape["data"], heads=N // shape["tensor"], **sizes)
    assert (sum(item.executions for item in found), sum(item.step_bytes for item in found)) == (count, size)
    assert count == shifts


def test_one_slice_sends_nothing():
    sizes = {"rows": 1, "heads": 1, "head_dim": 1, "groups": 1, "state_size": 1, "taps": 4, "itemsize": 4}
    assert shift_bytes(1, **sizes) == (0, 0)


@pytest.mark.parametrize("length, slices, nearest", [(50, 4, 48), (8, 4, 12), (7, 2, 8), (63, 8, 64)])
def test_a_length_that_cannot_be_cut_is_refused_with_the_nearest_that_can(length, slices, nearest):
    with pytest.raises(
        ValueError, match=rf"sequence={slices} need a length .* is {nearest}\. Received: length={length}"
    ):
        check_length(length, slices, W)
    check_length(nearest, slices, W)


def test_the_mesh_refuses_before_it_computes():
    (streams, dt, weights), _, _ = inputs(1)
    cut = Streams(*(each[:, :39] for each in streams))
    with jax.set_mesh(build_mesh(MeshSpec(sequence=8))):
        scan = functools.partial(sharded_convolve_and_scan, jax.sharding.get_abstract_mesh(), activation=jax.nn.silu)
        with pytest.raises(LayoutRefused, match="nearest such length is 40"):
            scan(cut, dt[:, :39], weights)


def test_rules_that_split_positions_over_another_axis_are_refused():
    (streams, dt, weights), _, _ = inputs(1)
    rules = (("activation_length", "tensor"), *DEFAULT_RULES)
    with jax.set_mesh(build_mesh(MeshSpec(tensor=2, sequence=2))), nn.logical_axis_rules(rules):
        scan = functools.partial(sharded_convolve_and_scan, jax.sharding.get_abstract_mesh(), activation=jax.nn.silu)
        with pytest.raises(LayoutRefused, match=r"activation_length on 'tensor'.*Use the rule"):
            scan(streams, dt, weights)


def test_a_convolution_of_one_tap_reads_nothing_of_the_slice_before():
    (streams, dt, weights), starts, _ = inputs(1)
    weights = weights._replace(taps=Streams(*(taps[..., -1:] for taps in weights.taps)))
    want, _ = convolve_and_scan(streams, dt, weights, activation=jax.nn.silu, starts=starts)
    with jax.set_mesh(build_mesh(MeshSpec(sequence=2))):
        scan = functools.partial(sharded_convolve_and_scan, jax.sharding.get_abstract_mesh(), activation=jax.nn.silu)
        got, _ = jax.jit(lambda *arguments: scan(*arguments, starts=starts))(streams, dt, weights)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
