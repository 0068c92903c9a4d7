"""Training with experts: any mesh is one device, every token counts once, biases move by their own rate."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.inference.decode import generate
from dew.nn.mlp import MlpSpec
from dew.nn.moe import ExpertsSpec
from dew.nn.router import RouterSpec, RouterTraining
from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout, LayoutRefused
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.rules import DEFAULT_RULES
from dew.training.optimizer import make_optimizer
from dew.training.router_bias import with_router_biases
from dew.training.step import batch_gradients
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer

RULES = (*DEFAULT_RULES, ("norm", "tensor"), ("router", "tensor"))
EXPERTS = ExpertsSpec(
    num_experts=8,
    features=32,
    router=RouterSpec(top_k=2, score="sigmoid", normalise=True, balance_bias=True),
    shared=MlpSpec(features=32),
)
DENSE = tiny_layer(num_kv_heads=4)
MIXED = dataclasses.replace(DENSE, mlp=EXPERTS)
LAYERS = (DENSE, MIXED, MIXED, MIXED)
RATE = 0.01
TRAINING = RouterTraining(balance_loss=0.5, z_loss=0.1, bias_rate=RATE)
MESHES = {
    "expert=4": MeshSpec(expert=4),
    "expert=2 fsdp=2 tensor=2": MeshSpec(expert=2, fsdp=2, tensor=2),
    "expert=2 fsdp=2 sequence=2": MeshSpec(expert=2, fsdp=2, sequence=2),
}


@functools.cache
def trainer(name=None, *, accumulation=1, training=TRAINING, optimizer="adamw", capacity=None, **fields) -> Trainer:
    mixed = dataclasses.replace(MIXED, mlp=dataclasses.replace(EXPERTS, capacity_factor=capacity))
    layers = tuple(mixed if layer is MIXED else layer for layer in LAYERS)
    module = tiny_decoder(layers=layers, router_training=training, **fields)
    mesh = build_mesh(MeshSpec(), jax.devices()[:1]) if name is None else build_mesh(MESHES[name])
    # Only experts are split on an expert axis; the rest of the model is whole there unless another axis takes it.
    layout = Layout(rules=RULES, min_shard=1, tolerance=1.0 if name == "expert=4" else 0)
    chosen = make_optimizer(optimizer, 1e-2, clip_norm=1.0, **({"eps": 1e-2} if optimizer == "adamw" else {}))
    return Trainer(LanguageModel(module), chosen, mesh=mesh, layout=layout, accumulation=accumulation)


def batch(seed=0, rows=8):
    """Draw packed rows of two documents and padding, with scored tokens as `tiny_batch` has them."""
    drawn = tiny_batch(rows=rows, length=24, seed=seed)
    segments = np.where(np.arange(25) < 9, 1, np.where(np.arange(25) < 20, 2, 0))
    return {**drawn, "segment_ids": np.broadcast_to(segments, drawn["tokens"].shape)}


def decided(run):
    """Draw weights whose routers are decided, so that rounding does not change a choice."""
    enlarge = lambda path, leaf: leaf * 30 if path[-2].key == "router" else leaf  # noqa: E731
    return jax.tree_util.tree_map_with_path(enlarge, jax.device_get(run.place().variables))


@functools.cache
def initial():
    return trainer().stacks.unstack(decided(trainer()))


def weights(run):
    """Give such weights, the same ones however a run stores and splits them."""
    return run.place(run.stacks.stack(initial())).variables


@functools.cache
def scored(name=None, **fields):
    run = trainer(name, **fields)
    differentiate = jax.jit(batch_gradients(run.objective, run.shardings().params))
    variables = weights(run)
    with run.context():
        output, gradients = differentiate(variables, run.place_batch(batch()), jax.random.key(0))
    statistics = {"loss": output.loss, **output.metrics}
    return jax.device_get(statistics), named_leaves(jax.device_get(gradients))


def assert_equal(got, want):
    for name, ratio in want[0].items():
        np.testing.assert_allclose(got[0][name].total, ratio.total, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(got[0][name].mass, ratio.mass, rtol=1e-6, err_msg=name)
    assert len(got[1]) > 0
    for path, value in got[1].items():
        expected = want[1][path]
        scale = np.abs(expected).max()
        assert scale > 0, f"{path} is zero: the test could not fail"
        np.testing.assert_allclose(value, expected, rtol=0, atol=2e-5 * scale, err_msg=path)


@pytest.mark.parametrize("name", MESHES)
def test_loss_metrics_and_every_gradient_equal_those_of_one_device(name):
    assert_equal(scored(name), scored())


def by_layer(run, leaves):
    view = run.stacks
    return {
        path: np.asarray(leaf if len(view.logical_paths(stored)) == 1 else leaf[place])
        for stored, leaf in leaves.items()
        for place, path in enumerate(view.logical_paths(stored))
    }


@pytest.mark.parametrize("fields", [{"scan_layers": False}, {"remat": "full"}], ids=str)
def test_scan_and_recomputation_change_nothing(fields):
    got, want = scored(**fields), scored()
    logical = by_layer(trainer(**fields), got[1]), by_layer(trainer(), want[1])
    assert logical[0].keys() == logical[1].keys()
    assert_equal((got[0], logical[0]), (want[0], logical[1]))


@pytest.mark.parametrize("fields", [{}, {"remat": "full"}], ids=str)
def test_the_gradient_of_a_balance_bias_counts_each_scored_token_once(fields):
    statistics, gradients = scored(**fields)
    scored_tokens = LanguageModel(trainer().objective.module).prepare(batch())["weights"].sum()
    load = statistics["expert_load"].total
    np.testing.assert_allclose(load.sum(axis=1), 2 * scored_tokens)
    biases = {p: g for p, g in by_layer(trainer(**fields), gradients).items() if p.endswith("balance_bias")}
    assert sorted(biases) == [f"layers_{i}/mlp/router/balance_bias" for i in (1, 2, 3)]
    for excess, (_, gradient) in zip(8 * load - load.sum(axis=1, keepdims=True), sorted(biases.items()), strict=True):
        np.testing.assert_array_equal(gradient, excess)
        assert np.abs(gradient).max() > 1


def staged(schedule=None):
    """Build a run whose layers are all alike and recomputed; None as schedule is one device."""
    mesh = MeshSpec(stage=2, fsdp=4) if schedule else build_mesh(MeshSpec(), jax.devices()[:1])
    module = tiny_decoder(layers=(MIXED,) * 4, router_training=TRAINING, remat="full", schedule=schedule or "gpipe")
    layout = Layout(rules=RULES, min_shard=1)
    return Trainer(LanguageModel(module), "sgd", mesh=mesh, layout=layout, accumulation=3)


@functools.cache
def routed_on_one_device():
    """Give weights and the load of each expert of each layer on two batches."""
    alone = staged()
    values = alone.place(decided(alone)).variables
    return jax.device_get(values), alone.evaluate(values, [batch(0), batch(1)])["expert_load"].total


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_window_of_a_pipeline_sums_the_excess_load_of_one_device(schedule):
    run, (values, load) = staged(schedule), routed_on_one_device()
    loop = run.loop(run.place(values))
    list(loop.run([batch(0), batch(1)]))
    sums = by_layer(run, named_leaves(jax.device_get(loop.state.accumulator.gradients)))
    for index, excess in enumerate(8 * load - load.sum(axis=1, keepdims=True)):
        np.testing.assert_array_equal(sums[f"layers_{index}/mlp/router/balance_bias"], excess)
        assert np.abs(excess).max() > 1


@functools.cache
def pooled(name=None, parts=1, **fields):
    """Evaluate 16 rows in as many batches, where experts drop what exceeds their capacity."""
    run, rows = trainer(name, capacity=0.7, **fields), batch(rows=16)
    cut = [{key: value[part::parts] for key, value in rows.items()} for part in range(parts)]
    return run.evaluate(weights(run), cut)


@pytest.mark.parametrize(
    "name, parts, fields",
    [
        (None, 4, ()),
        (None, 1, (("remat", "full"), ("scan_layers", False))),
        ("expert=4", 2, ()),
        ("expert=2 fsdp=2 sequence=2", 2, ()),
    ],
    ids=str,
)
def test_what_routers_report_does_not_depend_on_batches_storage_or_mesh(name, parts, fields):
    got, want = pooled(name, parts, **dict(fields)), pooled()
    assert got.keys() == want.keys() > {"dropped_slots", "expert_load", "router_entropy"}
    assert want["dropped_slots"].total > 10
    load = want["expert_load"]
    np.testing.assert_allclose(load.mass.sum(axis=1), load.total.sum(axis=1), rtol=1e-6)
    np.testing.assert_allclose(want["dropped_slots"].mass, load.total.sum(), rtol=1e-6)
    for key, ratio in want.items():
        np.testing.assert_allclose(got[key].total, ratio.total, rtol=1e-5, err_msg=key)
        np.testing.assert_allclose(got[key].mass, ratio.mass, rtol=1e-6, err_msg=key)


def trained(run, batches):
    start = run.place(weights(run))
    loop = run.loop(start)
    results = [result.read() for result in loop.run(batches)]
    return results, named_leaves(jax.device_get(loop.state.variables))


def test_two_batches_in_a_window_are_one_batch_of_their_rows():
    first, second = batch(0, 4), batch(1, 4)
    both = {name: np.concatenate([first[name], second[name]]) for name in first}
    _, want = trained(trainer(), [both])
    results, got = trained(trainer(accumulation=2), [first, second])
    moved = 0
    start = named_leaves(jax.device_get(weights(trainer())))
    for path, value in want.items():
        np.testing.assert_allclose(got[path], value, rtol=0, atol=2e-5 * max(np.abs(value).max(), 1e-3), err_msg=path)
        if path.endswith("balance_bias"):
            steps = np.abs(got[path] - start[path])
            assert np.all(np.isclose(steps, RATE) | (steps == 0)), path
            moved += np.count_nonzero(steps)
    assert moved > 12
    report = trainer().objective.report(results[0])
    assert 1 < report["expert_load_max"] <= 4
    assert report["dropped_slots"] == 0


def test_an_update_takes_from_experts_with_more_than_their_share_and_the_optimizer_sees_no_excess():
    def update(excess):
        optimizer = make_optimizer("adamw", 1e-2, clip_norm=1.0)
        optimizer = with_router_biases(optimizer, tiny_decoder(layers=LAYERS, router_training=TRAINING))
        params = {"router": {"balance_bias": jnp.ones(4), "kernel": jnp.ones((2, 4))}}
        gradients = {"router": {"balance_bias": jnp.array(excess), "kernel": jnp.full((2, 4), 0.3)}}
        return optimizer.update(gradients, optimizer.init(params), params)

    updates, state = update([900.0, -5.0, 0.0, -300.0])
    np.testing.assert_allclose(updates["router"]["balance_bias"], [-RATE, RATE, 0.0, RATE], rtol=1e-6)
    even, even_state = update([0.0] * 4)
    np.testing.assert_array_equal(updates["router"]["kernel"], even["router"]["kernel"])
    jax.tree.map(np.testing.assert_array_equal, state, even_state)


def test_biases_without_a_rate_stay_whatever_the_optimizer_does():
    run = trainer(training=RouterTraining(), optimizer="adamw")
    start = weights(run)
    start = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + 1.0 if path[-1].key == "balance_bias" else leaf, start
    )
    before = named_leaves(jax.device_get(start))
    loop = run.loop(run.place(start))
    list(loop.run([batch()]))
    after = named_leaves(jax.device_get(loop.state.variables))
    for path, value in before.items():
        if path.endswith("balance_bias"):
            np.testing.assert_array_equal(after[path], value, err_msg=path)
        elif path.endswith("kernel"):
            assert np.any(after[path] != value), path


def test_biases_are_float32_and_move_in_a_model_that_is_stored_in_bfloat16():
    run = trainer(optimizer="sgd", param_dtype="bfloat16", dtype="bfloat16")
    shift = lambda path, leaf: leaf + 4.0 if path[-1].key == "balance_bias" else leaf  # noqa: E731
    state = run.place(jax.tree_util.tree_map_with_path(shift, weights(run)))
    loop = run.loop(state)
    list(loop.run([batch()]))
    after = named_leaves(jax.device_get(loop.state.params))
    assert {str(leaf.dtype) for path, leaf in after.items() if not path.endswith("balance_bias")} == {"bfloat16"}
    moved = [leaf - np.float32(4.0) for path, leaf in after.items() if path.endswith("balance_bias")]
    assert all(leaf.dtype == np.float32 for leaf in moved)
    assert sum(np.count_nonzero(leaf) for leaf in moved) > 12
    for leaf in moved:  # half the distance between bfloat16 numbers at 4 is 0.0156
        assert np.all(np.isclose(np.abs(leaf), RATE, atol=1e-5) | (leaf == 0))


def test_perplexity_leaves_out_what_routers_add_to_the_loss():
    statistics, _ = scored()
    report = trainer().objective.report(statistics)
    assert report["loss"] - report["cross_entropy"] > 0.1
    np.testing.assert_allclose(report["perplexity"], np.exp(report["cross_entropy"]), rtol=1e-6)
    plain, gradients = scored(training=RouterTraining())
    assert not any(np.any(leaf) for path, leaf in gradients.items() if path.endswith("balance_bias"))
    np.testing.assert_allclose(report["cross_entropy"], plain["loss"].value(), rtol=1e-5)


def test_rules_that_put_experts_on_another_axis_are_refused():
    layout = Layout(rules=(("exp", "tensor"), *RULES), min_shard=1, tolerance=1.0)
    run = Trainer(LanguageModel(tiny_decoder(layers=LAYERS)), "adamw", mesh=MeshSpec(tensor=4), layout=layout)
    with pytest.raises(LayoutRefused, match=r"experts of a layer on \('tensor',\).*Use the rule \('exp', 'expert'\)"):
        list(run.loop(run.place()).run([batch()]))


@pytest.mark.parametrize("field", ["balance_loss", "z_loss", "bias_rate"])
def test_training_of_routers_that_the_model_does_not_have_is_refused(field):
    with pytest.raises(ValueError, match=rf"no layer of this model has experts\. .*Received: {field}=0\.1"):
        tiny_decoder(router_training=RouterTraining(**{field: 0.1}))


def test_a_rate_for_biases_that_no_router_has_is_refused():
    router = dataclasses.replace(EXPERTS.router, balance_bias=False)
    layers = (dataclasses.replace(DENSE, mlp=dataclasses.replace(EXPERTS, router=router)),)
    with pytest.raises(ValueError, match=r"bias_rate moves balance biases, and no router .*Received: bias_rate=0\.1"):
        tiny_decoder(layers=layers, router_training=RouterTraining(bias_rate=0.1))
    tiny_decoder(layers=layers, router_training=RouterTraining(z_loss=0.1))


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["balance_loss", "z_loss", "bias_rate"])
def test_a_weight_of_a_router_loss_that_is_no_number_of_0_or_more_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"{field} must be a finite number of 0 or more\. Received: {field}={value}"):
        RouterTraining(**{field: value})


def test_generation_drops_nothing_so_a_row_does_not_depend_on_its_batch():
    capped = tuple(dataclasses.replace(MIXED, mlp=dataclasses.replace(EXPERTS, capacity_factor=0.3)) for _ in range(2))
    module = tiny_decoder(layers=capped)
    loose = tiny_decoder(layers=(MIXED,) * 2)
    variables = {"params": module.init(jax.random.key(1), np.zeros((1, 2), np.int32))["params"]}
    prompts = [row[: 3 + 4 * n].tolist() for n, row in enumerate(tiny_batch(rows=3, length=12)["tokens"])]
    want = generate(loose, variables, prompts, max_new_tokens=6).tokens
    got = generate(module, variables, prompts, max_new_tokens=6).tokens
    np.testing.assert_array_equal(got, want)
    tokens = tiny_batch(rows=2)["tokens"]
    assert np.any(module.apply(variables, tokens) != loose.apply(variables, tokens)), "a whole sequence does drop"


def test_tokens_generated_on_an_expert_axis_are_those_of_one_device():
    prompts = [row[: 3 + n].tolist() for n, row in enumerate(tiny_batch(rows=4, length=6)["tokens"])]

    def tokens(name):
        run = trainer(name)
        return generate(run.objective.module, weights(run), prompts, max_new_tokens=6, layout=run.layout).tokens

    got, want = tokens("expert=2 fsdp=2 tensor=2"), tokens(None)
    assert all(np.array_equal(one, other) for one, other in zip(got, want, strict=True))
