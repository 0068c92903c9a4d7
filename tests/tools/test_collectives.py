"""The collectives of compiled programs: first programs whose answer is known, then the training step.

The step's tests are the proof of placement: what a tensor mesh and an fsdp mesh send, and how much they keep.
"""

import importlib.util
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dew.placement import MeshSpec, build_mesh

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load_tool():
    spec = importlib.util.spec_from_file_location("collectives_tool", ROOT / "tools" / "collectives.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()


def found(function, mesh, *arguments, **options):
    text = jax.jit(function, **options).lower(*arguments).compile().as_text()
    return tool.collectives(text, dict(mesh.shape))


@pytest.mark.parametrize("axis, size", [("fsdp", 2), ("tensor", 2), ("data", 2)])
def test_a_sum_in_a_loop_is_counted_once_per_trip_on_its_axis(axis, size):
    mesh = build_mesh(MeshSpec(fsdp=2, tensor=2))

    def local(x):
        return jax.lax.scan(lambda carry, _: (jax.lax.psum(carry, axis) * 0.1, None), x, length=5)[0]

    program = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    (reduce,) = found(program, mesh, jnp.ones((3, 7)))
    assert (reduce.kind, reduce.axes, reduce.group_size) == ("all-reduce", (axis,), size)
    assert reduce.trips == (5,)
    assert reduce.bytes == 3 * 7 * 4
    assert reduce.step_bytes == 5 * 3 * 7 * 4


def test_nested_loops_multiply():
    mesh = build_mesh(MeshSpec(tensor=8))

    def local(x):
        def inner(carry, _):
            return jax.lax.psum(carry, "tensor") * 0.1, None

        def outer(carry, _):
            return jax.lax.scan(inner, carry, length=3)[0] + 1, None

        return jax.lax.scan(outer, x, length=4)[0]

    program = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    (reduce,) = found(program, mesh, jnp.ones((2, 2)))
    assert reduce.trips == (4, 3)
    assert reduce.executions == 12


def test_a_gather_has_the_bytes_of_the_whole_array_and_both_axes():
    mesh = build_mesh(MeshSpec(fsdp=4, tensor=2))
    split = NamedSharding(mesh, P(("fsdp", "tensor")))
    whole = NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((16, 3), jnp.bfloat16, sharding=split)
    gathers = found(lambda a: jax.lax.with_sharding_constraint(a, whole), mesh, x)
    assert {item.kind for item in gathers} == {"all-gather"}
    assert {axis for item in gathers for axis in item.axes} == {"fsdp", "tensor"}
    assert max(math.prod(shape) for item in gathers for shape in item.shapes) == 48


def test_exchanges_and_shifts_name_their_axis():
    mesh = build_mesh(MeshSpec(fsdp=2, tensor=4))

    def local(x):
        y = jax.lax.all_to_all(x, "tensor", 0, 0, tiled=True)
        return jax.lax.ppermute(y, "fsdp", [(0, 1), (1, 0)])

    program = jax.shard_map(local, mesh=mesh, in_specs=P(("fsdp", "tensor")), out_specs=P(("fsdp", "tensor")))
    kinds = {item.kind: item.axes for item in found(program, mesh, jnp.ones((64, 2)))}
    assert kinds == {"all-to-all": ("tensor",), "collective-permute": ("fsdp",)}


def test_a_program_on_one_device_sends_nothing():
    assert found(lambda x: x @ x, build_mesh(), jnp.ones((4, 4))) == []


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        tool.collectives("hello", {"data": 1})


@pytest.mark.parametrize(
    "notation, groups",
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups={}", [list(range(8))]),
        ("replica_groups=mesh['a'=4,'b'=2] {'b'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2}}", [[0, 1], [2, 3]]),
    ],
)
def test_every_notation_of_groups_is_read(notation, groups):
    assert sorted(tool.replica_groups(f"x = f32[2] all-gather(y), {notation}, z=1", 8)) == groups


def test_a_start_and_its_done_count_once():
    text = """
ENTRY %main (p: f32[4]) -> f32[8] {
  %p = f32[4]{0} parameter(0)
  %start = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), replica_groups={{0,1}}, dimensions={0}
  ROOT %done = f32[8]{0} all-gather-done(%start)
}
"""
    (gather,) = tool.collectives(text, {"data": 2})
    assert (gather.kind, gather.bytes, gather.shapes) == ("all-gather", 32, ((8,),))
