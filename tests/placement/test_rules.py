"""Resolution of rules: what holds for every rule table, shape and mesh."""

import math
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from dew.placement.mesh import AXES
from dew.placement.rules import DEFAULT_RULES, normalized_rules, resolve, spec_axes

NAMES = ("embed", "mlp", "heads", "kv", "vocab", "head_dim", "layers", "unknown")


def mesh_of(**sizes: int):
    return types.SimpleNamespace(shape={axis: sizes.get(axis, 1) for axis in AXES})


meshes = st.builds(mesh_of, **{axis: st.sampled_from([1, 2, 3, 4]) for axis in AXES})
axes = st.one_of(
    st.none(), st.sampled_from(AXES), st.lists(st.sampled_from(AXES), min_size=1, max_size=3, unique=True).map(tuple)
)
tables = st.one_of(st.just(DEFAULT_RULES), st.lists(st.tuples(st.sampled_from(NAMES), axes), max_size=10).map(tuple))
dims = st.lists(st.sampled_from(NAMES), max_size=4, unique=True).flatmap(
    lambda names: st.tuples(
        st.just(names),
        st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24, 35]), min_size=len(names), max_size=len(names)),
    )
)


def by_exclusion(names, shape, mesh, rules):
    """Resolve as the rule reads: try, throw out one rule whose axes do not divide, start again."""
    rules = [(name, (a,) if isinstance(a, str) else a) for name, a in rules]
    rules = [(n, None if a is None else tuple(x for x in a if mesh.shape[x] > 1)) for n, a in rules]
    rules = [(n, a) for n, a in rules if a is None or a]
    while True:
        taken, result, origin = set(), {}, {}
        for index, (name, wanted) in enumerate(rules):
            if name in names and name not in result and not (wanted and taken & set(wanted)):
                result[name], origin[name] = wanted, index
                taken |= set(wanted or ())
        bad = [
            origin[name]
            for name, wanted in result.items()
            if wanted and shape[names.index(name)] % math.prod(mesh.shape[x] for x in wanted)
        ]
        if not bad:
            return [result.get(name) for name in names]
        del rules[min(bad)]


@given(dims, meshes, tables)
def test_first_fit_is_the_rule_with_misfits_thrown_out(named, mesh, rules):
    names, shape = named
    spec = resolve(names, shape, mesh, rules).spec
    entries = [(entry,) if isinstance(entry, str) else entry for entry in spec]
    entries += [None] * (len(names) - len(entries))
    assert entries == by_exclusion(names, shape, mesh, rules)


@given(dims, meshes, tables)
def test_every_axis_is_used_once_divides_and_exists(named, mesh, rules):
    names, shape = named
    resolution = resolve(names, shape, mesh, rules)
    used = spec_axes(resolution.spec)
    assert len(set(used)) == len(used)
    assert all(mesh.shape[axis] > 1 for axis in used)
    for size, entry in zip(shape, resolution.spec, strict=False):
        several = () if entry is None else (entry,) if isinstance(entry, str) else entry
        assert size % math.prod(mesh.shape[axis] for axis in several) == 0
    assert not resolution.spec or resolution.spec[-1] is not None


@given(dims, meshes, tables)
def test_a_dimension_is_split_or_has_a_reason(named, mesh, rules):
    names, shape = named
    resolution = resolve(names, shape, mesh, rules)
    entries = [*resolution.spec, *[None] * (len(names) - len(resolution.spec))]
    for entry, reason, rule in zip(entries, resolution.reasons, resolution.rules, strict=True):
        assert (entry is None) == (reason is not None)
        assert entry is None or rule is not None


@pytest.mark.parametrize(
    "names, shape, sizes, spec",
    [
        (("vocab", "embed"), (64, 32), {"fsdp": 2, "tensor": 2}, P("tensor", "fsdp")),
        (("embed", "mlp"), (32, 64), {"fsdp": 2, "tensor": 2}, P("fsdp", "tensor")),
        (("mlp", "embed"), (64, 32), {"fsdp": 8}, P(None, "fsdp")),
        (("mlp", "embed"), (64, 30), {"fsdp": 8}, P("fsdp")),
        (("embed", "heads", "head_dim"), (32, 4, 8), {"tensor": 4}, P(None, "tensor")),
        (("embed", "heads", "head_dim"), (36, 9, 64), {"fsdp": 8, "tensor": 2}, P(None, None, "fsdp")),
        (
            ("layers", "heads", "head_dim", "embed"),
            (8, 4, 8, 32),
            {"fsdp": 2, "tensor": 2},
            P(None, "tensor", None, "fsdp"),
        ),
        (("exp", "embed", "mlp"), (4, 32, 64), {"expert": 4, "tensor": 2, "fsdp": 2}, P("expert", "fsdp", "tensor")),
        (
            ("activation_batch", "activation_length", "activation_embed"),
            (8, 16, 32),
            {"data": 2, "fsdp": 4, "sequence": 2},
            P(("data", "fsdp"), "sequence"),
        ),
        (("activation_batch", "activation_length"), (2, 5), {"data": 2, "fsdp": 4, "sequence": 2}, P("data")),
        (("activation_batch", None, "activation_kv"), (1, 16, 3), {"data": 2, "tensor": 2}, P()),
        (("activation_batch", "activation_spread"), (4, 6), {"tensor": 4, "sequence": 2}, P(None, "sequence")),
    ],
)
def test_the_default_table(names, shape, sizes, spec):
    assert resolve(names, shape, mesh_of(**sizes)).spec == spec


def test_reasons_speak_of_heads():
    resolution = resolve(("embed", "heads", "head_dim"), (576, 9, 64), mesh_of(tensor=2))
    assert resolution.reasons[1] == "9 query heads do not divide tensor=2"
    resolution = resolve(("embed", "kv", "head_dim"), (576, 3, 64), mesh_of(tensor=2))
    assert resolution.reasons[1] == "3 kv heads do not divide tensor=2"


def test_manual_axes_count_as_absent():
    mesh = mesh_of(data=2, fsdp=4)
    mesh.manual_axes = ("data",)
    assert resolve(("activation_batch",), (8,), mesh).spec == P("fsdp")


def test_a_mapping_updates_the_defaults_in_place():
    rules = normalized_rules({"mlp": "fsdp", "embed": None, "mine": ("fsdp", "tensor")})
    assert [axes for name, axes in rules if name == "mlp"] == ["fsdp"]
    assert [axes for name, axes in rules if name == "embed"] == [None]
    assert rules[-1] == ("mine", ("fsdp", "tensor"))
    assert [rule for rule in rules if rule[0] not in ("mlp", "embed", "mine")] == [
        rule for rule in DEFAULT_RULES if rule[0] not in ("mlp", "embed")
    ]
    assert resolve(("embed", "mlp"), (32, 64), mesh_of(fsdp=2), rules).spec == P(None, "fsdp")


def test_malformed_rules_and_names_are_refused():
    with pytest.raises(ValueError, match=r"names mesh axis 'tensr'.*Did you mean 'tensor'"):
        normalized_rules([("mlp", "tensr")])
    with pytest.raises(ValueError, match="each axis once"):
        normalized_rules([("mlp", ("fsdp", "fsdp"))])
    with pytest.raises(TypeError, match="pair"):
        normalized_rules(["mlp"])
    with pytest.raises(TypeError, match=r"must name mesh axes.*Received: 3"):
        normalized_rules([("mlp", 3)])
    with pytest.raises(ValueError, match="repeat a name"):
        resolve(("mlp", "mlp"), (4, 4), mesh_of())
    with pytest.raises(ValueError, match="do not match shape"):
        resolve(("mlp",), (4, 4), mesh_of())
    with pytest.raises(ValueError, match="lacks"):
        resolve(("mlp",), (4,), types.SimpleNamespace(shape={"data": 8}))
