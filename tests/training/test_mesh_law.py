"""A step on any mesh is the step on one device: loss, metrics, every gradient leaf, the updated weights.

Every factorisation of 8 devices runs here with two sets of features that are opposites; `tools/mesh_law.py` has the
generator, and runs every factorisation with every set.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from dew.training.optimizer import make_optimizer
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer
from tools import mesh_law as law

COVER = law.pairwise_cover()
RTOL = 1e-5


@pytest.mark.parametrize("case", COVER, ids=str)
def test_training_on_a_factorisation_equals_training_on_one_device(case):
    verdict = law.judge(case)
    assert verdict.worst[1] <= RTOL, verdict.worst
    allowed = ("k_proj", "v_proj") if law.kept_whole(case) else ()
    assert [name for name in verdict.unsplit if not any(part in name for part in allowed)] == []
    assert verdict.holds


def levels(case):
    """Everything a case has: axis sizes, the factorisation, what its features are and are not."""
    return {*case.factors._asdict().items(), ("mesh", case.factors), *dataclasses.asdict(case.features).items()}


def test_any_two_features_meet_each_other_and_every_factorisation():
    assert len(law.factorisations()) == 20
    assert len(COVER) == 40
    met = {frozenset(pair) for case in COVER for pair in itertools.combinations(levels(case), 2)}
    names = [field.name for field in dataclasses.fields(law.Features)]
    for one, other in itertools.combinations(names, 2):
        for values in itertools.product((True, False), repeat=2):
            assert frozenset(zip((one, other), values, strict=True)) in met
    for name, value in itertools.product(names, (True, False)):
        for factors in law.factorisations():
            assert frozenset((("mesh", factors), (name, value))) in met


def test_the_whole_table_has_any_three_features_in_every_way():
    words = [dataclasses.astuple(features) for features in law.feature_words()]
    assert len(law.whole_table()) == 20 * len(set(words)) == 320
    for places in itertools.combinations(range(7), 3):
        assert len({tuple(word[place] for place in places) for word in words}) == 8


def test_cases_that_keep_matrices_whole_are_those_whose_heads_do_not_divide():
    listed = {case: reason for case in law.whole_table() if (reason := law.kept_whole(case))}
    assert len(listed) == 8
    assert sum(case in listed for case in COVER) == 1
    assert {case.factors for case in listed} == {law.Factors(data=1, fsdp=1, tensor=8, sequence=1)}
    case, reason = next(iter(listed.items()))
    assert reason in law.refusal(case)
    assert law.refusal(case._replace(features=dataclasses.replace(case.features, grouped=False))) == ""


@pytest.mark.parametrize("packed", [True, False])
def test_the_rows_are_awkward(packed):
    features = dataclasses.replace(law.feature_words()[0], packed=packed)
    batch = law.batch(features, 0)
    weights = LanguageModel(law.decoder(features)).prepare(batch)["weights"]
    assert weights[-1].sum() == 0, "a shard of rows that scores nothing"
    assert weights[:, law.UNSCORED].sum() == 0, "a slice of positions that scores nothing"
    assert len(set(weights.sum(axis=1).tolist())) > 5
    if packed:
        segments = batch["segment_ids"]
        assert segments[-1].sum() == 0, "a row of padding"
        assert segments[3, -1] == 0, "a tail of padding"
        borders = {int(border) for row in segments for border in np.flatnonzero(np.diff(row)) + 1}
        assert {4 * part for part in range(1, 8)} & borders
        assert {border for border in borders if border % 2} > {1, 5, 7}


def test_a_number_that_differs_breaks_the_law(monkeypatch):
    case = COVER[-1]
    want = dict(law.one_device(case.features))
    name = next(name for name in want if "gradient of" in name)
    want[name] = want[name] + 2 * RTOL * np.max(np.abs(want[name]))
    monkeypatch.setattr(law, "one_device", lambda features: want)
    verdict = law.judge(case)
    assert verdict.worst[0] == name
    assert not verdict.holds
    unsplit = dataclasses.replace(verdict, errors={name: 0.0}, unsplit=["a matrix"])
    assert not unsplit.holds


MESHES = {
    "fsdp=2 tensor=2": MeshSpec(fsdp=2, tensor=2),
    "fsdp=2 sequence=4": MeshSpec(fsdp=2, sequence=4),
}


@functools.cache
def trainer(name: str | None) -> Trainer:
    module = tiny_decoder(layers=(tiny_layer(num_kv_heads=4),) * 2)
    mesh = build_mesh(MeshSpec(), jax.devices()[:1]) if name is None else build_mesh(MESHES[name])
    return Trainer(
        LanguageModel(module),
        make_optimizer("adamw", 1e-2, clip_norm=1.0, eps=1e-2),
        mesh=mesh,
        layout=Layout(min_shard=1, tolerance=0),
        accumulation=2,
    )


@functools.cache
def trained(name: str | None) -> tuple[list[float], dict]:
    """Give the losses of four batches, two windows, and the weights after them."""
    run = trainer(name)
    loop = run.loop(run.place())
    losses = [result.read()["loss"].value() for result in loop.run(tiny_batch(seed=seed) for seed in range(4))]
    return losses, named_leaves(jax.device_get(loop.state.variables))


@pytest.mark.parametrize("name", MESHES)
def test_windows_of_two_batches_train_as_on_one_device(name):
    losses, variables = trained(name)
    want_losses, want_variables = trained(None)
    np.testing.assert_allclose(losses, want_losses, rtol=RTOL)
    for path, want in want_variables.items():
        np.testing.assert_allclose(variables[path], want, rtol=0, atol=RTOL * np.max(np.abs(want)), err_msg=path)


@pytest.mark.parametrize("name", MESHES)
def test_evaluation_equals_evaluation_on_one_device(name):
    def held_out(name):
        run = trainer(name)
        pooled = run.evaluate(run.place().variables, [tiny_batch(seed=7), tiny_batch(seed=8)])
        return run.objective.report(pooled)

    got, want = held_out(name), held_out(None)
    assert set(want) == {"loss", "token_accuracy", "perplexity"}
    assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("name", MESHES)
def test_gradients_and_moments_stay_where_their_parameters_are(name):
    run = trainer(name)
    loop = run.loop(run.place())
    list(loop.run([tiny_batch()]))  # the window is open: its sums are part of the state
    want = named_leaves(jax.tree.map(lambda leaf: leaf.sharding, loop.state.params))
    state = loop.state
    assert {p: leaf.sharding for p, leaf in named_leaves(state.accumulator.gradients).items()} == want
    moments = {path: leaf.sharding for path, leaf in named_leaves(state.opt_state).items() if "/mu/" in path}
    assert {path.split("/mu/")[1]: sharding for path, sharding in moments.items()} == want
