"""A step on any mesh is the step on one device: loss, metrics, every gradient leaf, the updated weights.

Every factorisation of 8 devices over data, fsdp, tensor and sequence runs here, and enough meshes with stages and
experts that any two things meet that can; `tools/mesh_law.py` has the whole table.
"""

import collections
import dataclasses
import functools
import itertools
import re

import jax
import numpy as np
import pytest

from dew.objectives.language import LanguageModel
from dew.objectives.routing import EXPERT_LOAD
from dew.placement.layout import Layout
from dew.placement.mesh import AXES, MeshSpec, build_mesh
from dew.training.optimizer import make_optimizer
from dew.training.placing import plain
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer
from tools import mesh_cases as table
from tools import mesh_law as law

COVER = table.cover()
RTOL = 1e-5
PLAIN = table.feature_words()[0]


@pytest.mark.parametrize("case", COVER, ids=str)
def test_training_on_a_mesh_equals_training_on_one_device(case):
    verdict = law.judge(case)
    assert verdict.worst[1] <= RTOL, verdict.worst
    assert verdict.unsplit == []
    assert verdict.holds


def levels(case):
    """Everything a case has: sizes of axes and which are split, how it is used, what its features are and are not."""
    sizes = case.factors._asdict().items()
    used = {(name, value) for name, value in case.way._asdict().items() if value is not None}
    split = {(f"splits {axis}", size > 1) for axis, size in sizes}
    return {*sizes, *split, *used, *dataclasses.asdict(case.features).items()}


def test_every_uniform_factorisation_runs_and_any_two_features_axes_and_exchanges_meet():
    uniform = [factors for factors in table.factorisations() if table.is_uniform(factors)]
    assert len(uniform) == 20
    assert sorted(case.factors for case in COVER if table.is_uniform(case.factors)) == sorted(uniform)
    assert len(COVER) <= 60
    met = {frozenset(pair) for case in COVER for pair in itertools.combinations(levels(case), 2)}
    names = [field.name for field in dataclasses.fields(table.Features)]
    for one, other in itertools.combinations(names, 2):
        for values in itertools.product((True, False), repeat=2):
            assert frozenset(zip((one, other), values, strict=True)) in met
    for name, value in itertools.product(names, (True, False)):
        for axis, is_split in itertools.product(AXES, (True, False)):
            is_refused = (axis, is_split, name, value) == ("stage", True, "scanned", False)
            assert (frozenset(((f"splits {axis}", is_split), (name, value))) in met) is not is_refused
        for exchange in table.EXCHANGES:
            is_refused = (exchange, name, value) == ("banded", "windowed", False)
            assert (frozenset((("exchange", exchange), (name, value))) in met) is not is_refused
    for exchange, size in itertools.product(table.EXCHANGES, (2, 4)):
        assert frozenset((("exchange", exchange), ("sequence", size))) in met


def test_stages_and_experts_meet_each_other_axis_each_schedule_and_each_feature():
    cases = [case for case in COVER if not table.is_uniform(case.factors)]
    for name, size in itertools.product(("stage", "expert"), (2, 4)):
        beside = {axis for case in cases if getattr(case.factors, name) == size
                  for axis, other in case.factors._asdict().items() if other > 1 and axis != name}  # fmt: skip
        assert beside == set(AXES) - {name}
    assert {case.factors.stage for case in cases} == {case.factors.expert for case in cases} == {1, 2, 4, 8}
    features = [field.name for field in dataclasses.fields(table.Features)]
    splits = lambda case, axis: getattr(case.factors, axis) > 1  # noqa: E731
    for name, value in itertools.product(features, (True, False)):
        having = [case for case in cases if getattr(case.features, name) is value]
        assert any(splits(case, "expert") for case in having)
        if (name, value) != ("scanned", False):
            wanted = {"gpipe"} if (name, value) == ("predicting", True) else set(table.SCHEDULES)
            assert {case.way.schedule for case in having} - {None} == wanted
            assert {case.way.turns for case in having} >= set(table.TURNS)
    for axis, schedule in itertools.product(AXES, table.SCHEDULES):
        assert any(splits(case, axis) and case.way.schedule == schedule for case in cases)
    for exchange, name in itertools.product(table.EXCHANGES, ("stage", "expert")):
        assert any(splits(case, name) and case.way.exchange == exchange for case in cases)


def test_experts_are_split_under_each_schedule_beside_each_axis_with_a_capacity_and_without():
    split = [case for case in COVER if case.factors.expert > 1]
    assert sum(not case.features.sparse for case in split) <= 2, "without experts their axis is another data axis"
    met = {
        (case.way.schedule, case.features.dressed, axis)
        for case in split
        for axis, size in case.factors._asdict().items()
        if case.features.sparse and size > 1
    }
    axes = set(AXES) - {"expert", "stage"}
    assert met >= set(itertools.product((None, *table.SCHEDULES), (True, False), axes))


def test_layers_that_predict_further_tokens_are_on_every_mesh_and_under_every_schedule_that_does_not_refuse_them():
    cases = [case for case in table.whole_table() if table.refused(case) is None]
    predicting = [case for case in cases if case.features.predicting]
    assert {case.factors for case in predicting} == set(table.factorisations())
    assert {case.way.schedule for case in predicting} == {None, "gpipe"}
    refused = next(case for case in cases if case.way.schedule == "1f1b")
    with pytest.raises(ValueError, match="schedule='1f1b' scores between the stages' passes"):
        law.decoder(dataclasses.replace(refused.features, predicting=True), refused.layers, refused.way)


def test_the_whole_table_has_any_three_of_the_first_eight_features_and_any_two_in_every_way():
    words = [dataclasses.astuple(features) for features in table.feature_words()]
    assert len(set(words)) == 16
    assert len({case.factors for case in table.whole_table()}) == 56
    for places in itertools.combinations(range(8), 3):
        assert len({tuple(word[place] for place in places) for word in words}) == 8
    for places in itertools.combinations(range(10), 2):
        assert len({tuple(word[place] for place in places) for word in words}) == 4


def test_the_whole_table_uses_every_mesh_in_every_way_that_it_can():
    met = collections.defaultdict(set)
    for case in table.whole_table():
        if table.refused(case) is None:
            met[case.factors].add(case.way)
    for factors in table.factorisations():
        assert len(met[factors]) >= min(6, len(table.ways(factors)))


REFUSED = {"scan_layers=False stores each layer on its own": 168, "it needs a window or chunks": 80}
KEPT_WHOLE = {"no rule puts 'embed' on an axis larger than 1": 215, "4 kv heads do not divide tensor=8": 7}


def test_the_cases_that_are_refused_are_these():
    cases = table.whole_table()
    assert collections.Counter(reason for case in cases if (reason := table.refused(case))) == REFUSED
    runs = [case for case in cases if table.refused(case) is None]
    assert collections.Counter(reason for case in runs if (reason := table.kept_whole(case))) == KEPT_WHOLE
    assert {case.factors for case in cases if table.kept_whole(case) == "4 kv heads do not divide tensor=8"} == {
        table.Factors(tensor=8)
    }


@pytest.mark.parametrize("reason", [*REFUSED, *KEPT_WHOLE])
def test_they_are_refused_by_that_name(reason):
    listed = table.refused if reason in REFUSED else table.kept_whole
    cases = (case for case in table.whole_table() if reason in REFUSED or table.refused(case) is None)
    assert reason in law.refusal(next(case for case in cases if listed(case) == reason))


@pytest.mark.parametrize("packed", [True, False])
def test_the_rows_are_awkward(packed):
    features = dataclasses.replace(PLAIN, packed=packed)
    batch = law.batch(features, 0)
    weights = LanguageModel(law.decoder(features, 1, table.Way())).prepare(batch)["weights"]
    assert weights[-2:].sum() == 0, "a shard of rows that scores nothing"
    assert weights[:, law.UNSCORED].sum() == 0, "a slice of positions that scores nothing"
    assert len(set(weights.sum(axis=1).tolist())) > 8
    if packed:
        segments = batch["segment_ids"]
        assert segments[-1].sum() == 0, "a row of padding"
        assert segments[-2].all(), "a row of documents that is masked"
        assert segments[3, -1] == 0, "a tail of padding"
        borders = {int(border) for row in segments for border in np.flatnonzero(np.diff(row)) + 1}
        assert {4 * part for part in range(1, 8)} <= borders
        assert {border for border in borders if border % 2} > {1, 5, 7}


@pytest.mark.parametrize("dressed", [True, False])
def test_rounding_changes_no_choice_of_experts(dressed):
    features = dataclasses.replace(PLAIN, sparse=True, scanned=True, dressed=dressed, predicting=True)
    module = law.decoder(features, 4, table.Way())
    run = Trainer(LanguageModel(module), "sgd", mesh=build_mesh(MeshSpec(), jax.devices()[:1]))
    values = law.initial_values(plain(run.abstract_variables()), features)
    generator = np.random.default_rng(1)
    moved = jax.tree.map(lambda leaf: leaf * (1 + generator.normal(0, 1e-3, leaf.shape).astype(np.float32)), values)

    def load(variables):
        return run.evaluate(variables, [law.batch(features, 0)])[EXPERT_LOAD]

    want = load(values)
    np.testing.assert_array_equal(load(moved).total, want.total)
    assert np.max(want.total / want.mass) > 2, "experts are named unequally often"


def test_a_number_that_differs_breaks_the_law(monkeypatch):
    case = COVER[0]
    want = dict(law.one_device(case.features, case.layers))
    name = next(name for name in want if "gradient of" in name)
    want[name] = want[name] + 2 * RTOL * np.max(np.abs(want[name]))
    monkeypatch.setattr(law, "one_device", lambda features, layers: want)
    verdict = law.judge(case)
    assert verdict.worst[0] == name
    assert not verdict.holds
    unsplit = dataclasses.replace(verdict, errors={name: 0.0}, unsplit=["a matrix"])
    assert not unsplit.holds


def test_the_axes_of_a_mesh_may_be_written_in_any_order():
    assert table.parse_factors("sequence=2, fsdp=4") == table.Factors(fsdp=4, sequence=2)
    assert table.parse_factors("stage=4,data=2,tensor=1") == table.Factors(data=2, stage=4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--mesh", "fsdp=4,sequences=2"], r"the axes are data, expert, .*Received: 'sequences=2' in"),
        (["--mesh", "fsdp=4,fsdp=2"], "each axis once"),
        (["--mesh", "fsdp"], "written as axes and sizes"),
        (["--mesh", "fsdp=4"], "lays 4 devices out, and the law is about 8"),
        (["--mesh", "fsdp=8", "--axis", "stage"], "no case is left of what was asked for"),
        (["--part", "3/2"], "a part is written as in 2/4"),
        (["--mesh", "stage=8", "--cover", "--part", "1/999"], "no case is left"),
        (["--mesh", "fsdp=8", "--without", "fsdp"], "no case is left"),
        (["--axis", "pipeline"], "invalid choice"),
    ],
)
def test_a_selection_that_is_wrong_or_empty_is_an_error(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(law, "judge", lambda case: pytest.fail("nothing is to run"))
    with pytest.raises(SystemExit) as caught:
        law.main(arguments)
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_tool_runs_what_is_selected_and_its_exit_status_says_whether_all_hold(capsys, monkeypatch):
    ran = []

    def judge(case):
        ran.append(case)
        return law.Verdict(case=case, errors={"loss": 3e-6 if len(ran) < 2 else 1.0}, unsplit=[], seconds=0.0)

    monkeypatch.setattr(law, "judge", judge)
    assert law.main(["--cover", "--mesh", "sequence=2,fsdp=4"]) == 0
    assert [case.factors for case in ran] == [table.Factors(fsdp=4, sequence=2)]
    assert "1 cases: 1 hold, 0 are refused as listed, 0 fail; the worst error is 3.0e-06" in capsys.readouterr().out
    assert law.main(["--cover", "--mesh", "fsdp=8", "--without", "stage"]) == 1
    assert "FAILS   fsdp=8" in capsys.readouterr().out


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
def drawn() -> dict:
    """Draw the weights to train from, which are the same on every mesh."""
    return jax.device_get(trainer(None).place().variables)


@functools.cache
def trained(name: str | None) -> tuple[list[float], dict]:
    """Give the losses of four batches, two windows, and the weights after them."""
    run = trainer(name)
    loop = run.loop(run.place(drawn()))
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
        pooled = run.evaluate(run.place(drawn()).variables, [tiny_batch(seed=7), tiny_batch(seed=8)])
        return run.objective.report(pooled)

    got, want = held_out(name), held_out(None)
    assert set(want) == {"loss", "token_accuracy", "perplexity"}
    assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("name", MESHES)
def test_gradients_and_moments_stay_where_their_parameters_are(name):
    run = trainer(name)
    loop = run.loop(run.place(drawn()))
    list(loop.run([tiny_batch()]))  # the window is open: its sums are part of the state
    want = named_leaves(jax.tree.map(lambda leaf: leaf.sharding, loop.state.params))
    state = loop.state
    assert {p: leaf.sharding for p, leaf in named_leaves(state.accumulator.gradients).items()} == want
    moments = {path: leaf.sharding for path, leaf in named_leaves(state.opt_state).items() if "/mu/" in path}
    assert {path.split("/mu/")[1]: sharding for path, sharding in moments.items()} == want
