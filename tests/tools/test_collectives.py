"""The collectives of compiled programs: first programs whose answer is known, then the training step.

The step's tests are the proof of placement: what a tensor mesh and an fsdp mesh send, and how much they keep.
"""

import importlib.util
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dew.objectives.language import LanguageModel
from dew.placement import Layout, MeshSpec, build_mesh
from dew.training.trainer import Trainer

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


LAYERS, ROWS, LENGTH, WIDTH, HEADS, MLP, VOCAB = 4, 8, 24, 64, 8, 160, 112
# One layer's stored weights; every size is unlike that of an activation of 8 rows x 24 positions.
LAYER_SHAPES = [
    *[(WIDTH,)] * 2,
    *[(WIDTH, HEADS, WIDTH // HEADS)] * 3,
    (HEADS, WIDTH // HEADS, WIDTH),
    *[(WIDTH, MLP)] * 2,
    (MLP, WIDTH),
]


def llama(layers, remat=None, width=WIDTH, mlp=MLP):
    return tool.llama_like(
        layers=layers, width=width, heads=HEADS, kv_heads=HEADS, mlp=mlp, vocab=VOCAB, length=LENGTH, remat=remat
    )


def trainer(module, mesh):
    return Trainer(LanguageModel(module), "adamw", mesh=mesh, layout=Layout(min_shard=1, tolerance=0))


def report(mesh, remat=None):
    batch = {"tokens": np.ones((ROWS, LENGTH + 1), np.int32)}
    return tool.step_report(trainer(llama(LAYERS, remat), mesh), batch)


def sizes(items):
    """Elements of every result, sorted: a weight may arrive transposed or flattened."""
    return sorted(math.prod(shape) for item in items for shape in item.shapes)


def in_loop(found, phase):
    return [item for item in found if item.trips and item.phase == phase]


@pytest.fixture(scope="module")
def tensor_step():
    return report(MeshSpec(tensor=8))


@pytest.fixture(scope="module")
def fsdp_step():
    return report(MeshSpec(fsdp=8))


def test_on_a_tensor_mesh_no_block_weight_is_gathered(tensor_step):
    looped = [item for item in tensor_step.found if item.trips]
    assert looped
    assert {item.kind for item in looped} == {"all-reduce"}
    assert {item.trips for item in looped} == {(LAYERS,)}
    weights = {math.prod(shape) for shape in LAYER_SHAPES} - {WIDTH}
    moved = [item for item in tensor_step.found if item.kind != "all-reduce"]
    assert not weights & {size for item in moved for size in sizes([item])}


def test_on_a_tensor_mesh_the_forward_of_a_block_has_two_reductions(tensor_step):
    forward = in_loop(tensor_step.found, "forward")
    assert [item.shapes for item in forward] == [((ROWS, LENGTH, WIDTH),)] * 2
    assert {item.axes for item in forward} == {("tensor",)}


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_on_an_fsdp_mesh_each_weight_of_a_layer_is_gathered_in_the_scan(fsdp_step, phase):
    gathers = [item for item in in_loop(fsdp_step.found, phase) if item.kind == "all-gather"]
    assert sizes(gathers) == sorted(math.prod(shape) for shape in LAYER_SHAPES)
    assert {item.trips for item in gathers} == {(LAYERS,)}
    assert {item.axes for item in gathers} == {("fsdp",)}


def test_on_an_fsdp_mesh_only_gradients_are_reduced(fsdp_step):
    reductions = [item for item in fsdp_step.found if item.kind in ("all-reduce", "reduce-scatter")]
    looped = [item for item in reductions if item.trips]
    assert {item.phase for item in looped} == {"backward"}
    assert sizes(looped) == sorted(math.prod(shape) for shape in LAYER_SHAPES)
    assert {item.note for item in looped} == {"reduce-scatter on GPU/TPU"}
    outside = [size for item in reductions if not item.trips for size in sizes([item])]
    # The final norm, the table or one device's part of it, and the scalars of the loss and the update.
    assert set(outside) <= {1, WIDTH, VOCAB * WIDTH, VOCAB * WIDTH // 8}


@pytest.mark.parametrize("step", ["tensor_step", "fsdp_step"])
def test_logits_never_travel(step, request):
    shapes = {shape for item in request.getfixturevalue(step).found for shape in item.shapes}
    logits = {ROWS * LENGTH * VOCAB // parts for parts in (1, 8, 64)}
    assert not logits & {math.prod(shape) for shape in shapes}
    assert {math.prod(shape) for shape in shapes if VOCAB in shape} <= {VOCAB * WIDTH, VOCAB * WIDTH // 8}


def test_full_recomputation_gathers_no_more_than_none(fsdp_step):
    assert sizes(item for item in report(MeshSpec(fsdp=8), "full").found if item.kind == "all-gather") == sizes(
        item for item in fsdp_step.found if item.kind == "all-gather"
    )


@pytest.mark.slow
@pytest.mark.parametrize("layers", [4, 8, 16])
def test_temporaries_of_an_fsdp_step_are_three_layers_and_an_eighth_of_the_rest(layers):
    # The rest is whatever else the step holds on one device: gradients, activations, copies of the update.
    module = llama(layers, width=128, mlp=512)
    batch = {"tokens": np.ones((8, 9), np.int32)}
    split = tool.step_report(trainer(module, MeshSpec(fsdp=8)), batch)
    alone = tool.step_report(trainer(module, build_mesh(MeshSpec(), jax.devices()[:1])), batch)
    layer = 4 * (4 * 128 * 128 + 3 * 128 * 512 + 2 * 128)
    assert split.parameter_bytes > layers * layer
    assert split.temporary_bytes <= 3 * layer + (alone.temporary_bytes - 3 * layer) / 8


def test_the_table_says_what_a_reader_needs(fsdp_step):
    text = fsdp_step.table()
    assert "in a loop of 4" in text
    assert "(reduce-scatter on GPU/TPU)" in text
    assert f"parameters {fsdp_step.parameter_bytes:,} bytes" in text


def test_the_command_prints_the_report(capsys):
    words = ["--mesh", "fsdp=2,tensor=2", "--layers", "2", "--width", "32", "--heads", "4", "--kv-heads", "4"]
    tool.main([*words, "--mlp", "64", "--vocab", "64", "--length", "8", "--min-shard", "1"])
    text = capsys.readouterr().out
    assert "all-gather over fsdp" in text
    assert "all-reduce over tensor" in text
