"""Each scan on a mesh is the scan on one device, and sends what `shift_bytes` says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from dew.parallel.delta_scan import Gates, convolve_and_correct
from dew.parallel.scan_slices import Streams, check_length, shift_bytes
from dew.parallel.ssm_scan import ScanWeights, convolve_and_scan
from dew.placement.layout import LayoutRefused
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.rules import DEFAULT_RULES
from tests.parallel.traced import traced_bytes
from tests.tools.test_collectives import tool

B, T, N, H, P, W = 4, 48, 4, 3, 5, 4
KEYS, R = 2, 2
SCANS = {"one group": (convolve_and_scan, 1), "groups": (convolve_and_scan, 2), "delta": (convolve_and_correct, KEYS)}
"""The scan of each law, and how many groups it has."""
LAYOUTS = (((B, T), ()), ((), (W,)), ((), ()))
"""Dimensions before and after those of the channels: of streams, of taps, of biases."""
MESHES = {
    "sequence=2": MeshSpec(sequence=2),
    "sequence=4 tensor=2": MeshSpec(sequence=4, tensor=2),
    "sequence=2 tensor=2 fsdp=2": MeshSpec(sequence=2, tensor=2, fsdp=2),
    "sequence=8": MeshSpec(sequence=8),
    "tensor=4": MeshSpec(tensor=4),
}


@functools.cache
def drawn(name):
    """Arguments, the documents of a packed batch, and the weights of the outputs in a loss.

    Borders of documents are on those of slices, one after, one before; the last row is one document.
    """
    scan, groups = SCANS[name]
    generator = np.random.default_rng(groups)

    def draw(*shape):
        return generator.standard_normal(shape).astype(np.float32)

    heads = (KEYS, R * H) if scan is convolve_and_correct else (N, H)
    channels = (heads, (groups, P), (groups, P))
    streams, taps, biases = (Streams(*(draw(*front, *dims, *back) for dims in channels)) for front, back in LAYOUTS)
    if scan is convolve_and_correct:
        # Slow decays: what the first slice leaves must reach the last one.
        gates = Gates(-np.exp(draw(B, T, KEYS, R) - 4), 1 / (1 + np.exp(-draw(B, T, KEYS, R))))
        arguments = (streams, gates, taps)
    else:
        decay = -np.exp(np.linspace(-4.0, 0.0, N, dtype=np.float32))
        dt = np.exp(generator.uniform(-4, 0, (B, T, N))).astype(np.float32)
        arguments = (streams, dt, ScanWeights(taps, biases, decay, skip=draw(N)))
    starts = np.zeros((B, T), bool)
    starts[0, [6, 12, 24, 36]] = starts[1, [13, 25]] = starts[2, [23, 47]] = True
    return arguments, starts, draw(B, T, *heads)


def inputs(name):
    """What was drawn as arrays of the mesh in context: kept ones would bring an earlier test's mesh along."""
    return jax.tree.map(jnp.asarray, drawn(name))


def scan_of(name):
    """The scan on the mesh in context."""
    return functools.partial(SCANS[name][0], jax.sharding.get_abstract_mesh(), activation=jax.nn.silu)


def gradients(name):
    """The function from arguments and tokens that begin documents to the outputs and the gradients of a loss."""
    scan, weight = scan_of(name), drawn(name)[2]

    def loss(arguments, starts):
        y = scan(*arguments, starts=starts)[0]
        return jnp.sum(weight * y), y

    return jax.jit(jax.grad(loss, has_aux=True))


def narrow(arguments):
    """Round streams, as a layer that computes in bfloat16 gives them."""
    streams, *rest = arguments
    return (jax.tree.map(lambda each: each.astype(jnp.bfloat16), streams), *rest)


@functools.cache
def on_one_device(name):
    with jax.set_mesh(build_mesh(MeshSpec(), jax.devices()[:1])):
        return jax.device_get(gradients(name)(*inputs(name)[:2]))


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_computes_what_one_device_does(mesh, name):
    with jax.set_mesh(build_mesh(MESHES[mesh])):
        got = gradients(name)(*inputs(name)[:2])
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(on_one_device(name)), strict=True):
        scale = np.abs(theirs).max()
        assert scale > 0
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name", ["one group", "delta"])
def test_streams_in_bfloat16_are_scanned_as_on_one_device_and_send_halves_of_bytes(name):
    arguments, starts, _ = inputs(name)
    mesh = build_mesh(MESHES["sequence=2"])
    with jax.set_mesh(mesh):
        got, y = gradients(name)(narrow(arguments), starts)
        traced = traced_bytes(jax.make_jaxpr(gradients(name))(narrow(arguments), starts))
    assert traced == {"collective-permute": 2 * counted(name, dict(mesh.shape), itemsize=2)[1]}
    rounded = jax.tree.map(lambda each: each.astype(jnp.float32), narrow(arguments))
    with jax.set_mesh(build_mesh(MeshSpec(), jax.devices()[:1])):
        want, want_y = gradients(name)(rounded, starts)
    for ours, theirs in zip(jax.tree.leaves((got, y)), jax.tree.leaves((want, want_y)), strict=True):
        np.testing.assert_allclose(ours.astype(np.float32), theirs, rtol=0, atol=5e-2 * np.abs(theirs).max())


def counted(name, shape, itemsize=4):
    """The formula for one device of a mesh of this shape."""
    scan, groups = SCANS[name]
    is_delta = scan is convolve_and_correct
    return shift_bytes(
        shape["sequence"],
        rows=B // (shape["data"] * shape["fsdp"]),
        heads=(KEYS if is_delta else N) // shape["tensor"],
        head_dim=R * H if is_delta else H,
        groups=groups if groups == 1 else groups // shape["tensor"],
        state_size=P,
        taps=W,
        itemsize=itemsize,
        transition=R * P * P if is_delta else 1,
    )


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize(
    "mesh, shifts",
    [("sequence=2", 2), ("sequence=2 tensor=2 fsdp=2", 2), ("sequence=4 tensor=2", 4), ("sequence=8", 5)],
)
def test_the_shifts_are_those_of_the_formula(mesh, shifts, name):
    devices = build_mesh(MESHES[mesh])
    shape = dict(devices.shape)
    arguments, starts, _ = inputs(name)
    with jax.set_mesh(devices):
        scan = scan_of(name)
        run = jax.jit(
            lambda arguments, starts: scan(*arguments, starts=starts)[0],
            out_shardings=NamedSharding(devices, PartitionSpec(("data", "fsdp"), "sequence", "tensor")),
        )
        text = run.lower(arguments, starts).compile().as_text()
    found = [item for item in tool.collectives(text, shape) if "sequence" in item.axes]
    assert {item.kind for item in found} == {"collective-permute"}
    sent = (sum(item.executions for item in found), sum(item.step_bytes for item in found))
    assert sent == counted(name, shape)
    assert sent[0] == shifts


@pytest.mark.parametrize("name", SCANS)
def test_the_backward_pass_shifts_as_much_the_other_way(name):
    arguments, starts, _ = inputs(name)
    mesh = build_mesh(MESHES["sequence=4 tensor=2"])
    with jax.set_mesh(mesh):
        traced = traced_bytes(jax.make_jaxpr(gradients(name))(arguments, starts))
    assert traced == {"collective-permute": 2 * counted(name, dict(mesh.shape))[1]}


def test_one_slice_sends_nothing():
    assert counted("delta", {"sequence": 1, "data": 1, "fsdp": 1, "tensor": 1}) == (0, 0)


@pytest.mark.parametrize("length, slices, nearest", [(50, 4, 48), (8, 4, 12), (7, 2, 8), (63, 8, 64)])
def test_a_length_that_cannot_be_cut_is_refused_with_the_nearest_that_can(length, slices, nearest):
    with pytest.raises(
        ValueError, match=rf"sequence={slices} need a length .* is {nearest}\. Received: length={length}"
    ):
        check_length(length, slices, W)
    check_length(nearest, slices, W)


def test_a_convolution_of_one_tap_is_not_said_to_read_back():
    with pytest.raises(LayoutRefused, match=r"sequence=4 need a length that 4 divides, which 50 is not"):
        check_length(50, 4, 1)


@pytest.mark.parametrize("name", ["one group", "delta"])
def test_the_mesh_refuses_before_it_computes(name):
    (streams, drive, weights), _, _ = inputs(name)
    streams, drive = jax.tree.map(lambda each: each[:, :39], (streams, drive))
    with (
        jax.set_mesh(build_mesh(MeshSpec(sequence=8))),
        pytest.raises(LayoutRefused, match=r"Layers with a state on sequence=8 .* nearest such length is 40"),
    ):
        scan_of(name)(streams, drive, weights)


def test_rules_that_split_positions_over_another_axis_are_refused():
    arguments, _, _ = inputs("one group")
    rules = (("activation_length", "tensor"), *DEFAULT_RULES)
    with (
        jax.set_mesh(build_mesh(MeshSpec(tensor=2, sequence=2))),
        nn.logical_axis_rules(rules),
        pytest.raises(LayoutRefused, match=r"activation_length on 'tensor'.*Use the rule"),
    ):
        scan_of("one group")(*arguments)


def test_a_convolution_of_one_tap_reads_nothing_of_the_slice_before():
    (streams, dt, weights), starts, _ = inputs("one group")
    arguments = (streams, dt, weights._replace(taps=Streams(*(taps[..., -1:] for taps in weights.taps))))
    want, _ = convolve_and_scan(None, *arguments, activation=jax.nn.silu, starts=starts)
    with jax.set_mesh(build_mesh(MeshSpec(sequence=2))):
        scan = scan_of("one group")
        got, _ = jax.jit(lambda *arguments: scan(*arguments, starts=starts))(*arguments)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
