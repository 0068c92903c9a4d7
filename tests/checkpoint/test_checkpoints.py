"""A checkpoint restores on another mesh and in other banks, and a broken or foreign one is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dew.checkpoint.manifest import Manifest, shapes_on
from dew.checkpoint.save import Checkpoints
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.stacks import Bank, StackView

BANKED = StackView((Bank("layers_0_3", tuple(f"layers_{index}" for index in range(4))),))
PAIRS = StackView((Bank("layers_0_1", ("layers_0", "layers_1")), Bank("layers_2_3", ("layers_2", "layers_3"))))
LAYERS = StackView()


def tree():
    """A state-like tree in one bank: a tuple, a bank in two places, a scalar."""
    kernel = np.arange(4 * 16 * 8, dtype=np.float32).reshape(4, 16, 8)
    params = {"layers_0_3": {"kernel": kernel}, "norm": {"scale": np.arange(8, dtype=np.float32)}}
    moments = jax.tree.map(lambda leaf: -leaf, params)
    return {"params": params, "opt_state": (np.asarray(3, np.int32), {"mu": moments})}


def placed(values, spec, stacks):
    mesh = build_mesh(spec)

    def place(leaf):
        rows = PartitionSpec(*(None,) * (leaf.ndim - 2), "fsdp") if leaf.ndim >= 2 else PartitionSpec()
        return NamedSharding(mesh, rows)

    logical = BANKED.unstack(values)
    return jax.tree.map(lambda leaf: jax.device_put(jnp.array(leaf), place(leaf)), stacks.stack(logical))


def saved(path, spec=MeshSpec(fsdp=8), stacks=BANKED):
    checkpoints = Checkpoints(path)
    checkpoints.save(5, placed(tree(), spec, stacks), stacks=stacks, facts={"window": 2}, position={"batches": 7})
    checkpoints.wait()
    return checkpoints


@pytest.mark.parametrize("to_stacks", [BANKED, PAIRS, LAYERS], ids=["bank", "pairs", "layers"])
@pytest.mark.parametrize("to_spec", [MeshSpec(fsdp=8), MeshSpec(fsdp=2, tensor=2), MeshSpec()], ids=str)
def test_the_values_come_back_on_another_mesh_in_other_banks(tmp_path, to_spec, to_stacks):
    saved(tmp_path / "run").close()
    template = placed(jax.tree.map(np.zeros_like, tree()), to_spec, to_stacks)
    template = shapes_on(template, jax.tree.map(lambda leaf: leaf.sharding, template))
    got = Checkpoints(tmp_path / "run").restore(template, stacks=to_stacks)
    assert jax.tree.structure(got) == jax.tree.structure(template)
    jax.tree.map(lambda leaf, want: leaf.sharding == want.sharding or pytest.fail(f"{leaf.sharding}"), got, template)
    want = to_stacks.stack(BANKED.unstack(tree()))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), want)


def test_leaves_are_named_per_layer_however_they_are_stored(tmp_path):
    names = [
        saved(tmp_path / str(number), stacks=stacks).manifest().leaves for number, stacks in enumerate((BANKED, PAIRS))
    ]
    assert names[0] == names[1]
    assert names[0]["params/layers_3/kernel"] == ((16, 8), "float32")
    assert names[0]["opt_state/1/mu/layers_3/kernel"] == ((16, 8), "float32")


def test_facts_and_positions_come_back(tmp_path):
    manifest = saved(tmp_path / "run").manifest(5)
    assert (manifest.facts, manifest.position) == ({"window": 2}, {"batches": 7})
    assert manifest.stacks == BANKED


@pytest.mark.parametrize("position", [None, b"\x00\xff", {"a": [1, 2]}, 3])
def test_a_position_is_json_or_bytes(position):
    manifest = Manifest(leaves={}, stacks=LAYERS, facts={}, position=position)
    assert Manifest.from_json(manifest.to_json()).position == position


def test_the_newest_steps_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run", keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, {"x": jnp.full((2,), step)}, facts={})
    checkpoints.wait()
    assert checkpoints.steps() == (2, 3)
    assert checkpoints.latest() == 3


def test_arrays_may_be_donated_as_soon_as_saving_has_started(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    change = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(jnp.zeros((256, 1024)), NamedSharding(build_mesh(MeshSpec(fsdp=8)), PartitionSpec("fsdp")))
    checkpoints.save(1, {"x": x}, facts={})
    for _ in range(5):
        x = change(x)
    checkpoints.wait()
    template = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)}
    assert float(jnp.abs(checkpoints.restore(template)["x"]).max()) == 0.0


def test_nothing_is_made_before_the_first_save(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.latest() is None
    checkpoints.wait()
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint in .*run"):
        checkpoints.manifest()
    assert not (tmp_path / "run").exists()


def test_an_interrupted_save_leaves_the_step_before_it(tmp_path):
    checkpoints = saved(tmp_path / "run")
    checkpoints.close()
    # What a process that is killed while it writes step 6 leaves behind.
    (tmp_path / "run" / "6.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "run" / "6.orbax-checkpoint-tmp" / "half").write_text("x")
    again = Checkpoints(tmp_path / "run")
    assert again.steps() == (5,)
    again.save(6, placed(tree(), MeshSpec(), BANKED), stacks=BANKED, facts={})
    again.wait()
    assert again.steps() == (5, 6)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t["params"].update(extra=t["params"]["norm"]), r"lacks \['params/extra/scale'\]"),
        (lambda t: t["params"].pop("norm"), r"holds \['params/norm/scale'\]"),
        (
            lambda t: t["params"]["norm"].update(scale=jax.ShapeDtypeStruct((9,), np.float32)),
            r"params/norm/scale: saved \(\(8,\), 'float32'\), wanted \(\(9,\), 'float32'\)",
        ),
    ],
)
def test_a_checkpoint_of_another_structure_is_refused(tmp_path, change, message):
    checkpoints = saved(tmp_path / "run")
    template = placed(tree(), MeshSpec(), BANKED)
    template = shapes_on(template, jax.tree.map(lambda leaf: leaf.sharding, template))
    change(template)
    with pytest.raises(ValueError, match=message):
        checkpoints.restore(template, stacks=BANKED)


def test_another_format_is_refused():
    values = Manifest(leaves={}, stacks=LAYERS, facts={}, position=None).to_json() | {"format": 99}
    with pytest.raises(ValueError, match="format 99; this version reads format 1"):
        Manifest.from_json(values)


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Checkpoints(tmp_path, keep=0)
