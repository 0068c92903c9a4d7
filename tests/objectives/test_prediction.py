"""Layers that predict further tokens against NumPy, document by document; what they read, score and leave alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn.embed import HeadSpec
from dew.nn.norm import NormSpec
from dew.nn.prediction import PredictionSpec
from dew.nn.sharding import unboxed
from dew.objectives.language import LanguageModel
from dew.placement.stacks import stack_view
from tests.nn import slow_decoder
from tests.parallel.sequences import packed_batch
from tests.tiny import tiny_decoder, tiny_layer

WEIGHT = 0.3
NORM = NormSpec(eps=1e-5, offset=0.5)


@functools.cache
def model(is_shared=False, depth=2, **fields):
    """Give a decoder with layers that predict, its variables far from initial ones, and both per layer in float64."""
    spec = PredictionSpec(layer=tiny_layer(num_kv_heads=4), depth=depth, is_shared=is_shared)
    module = tiny_decoder(num_layers=2, norm=NORM, prediction=spec, **fields)
    variables = unboxed(jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(variables))))
    drawn = lambda leaf: leaf + 0.2 * jax.random.normal(next(keys), leaf.shape)  # noqa: E731
    variables = jax.tree.map(drawn, variables)
    layers = stack_view(module).unstack(variables)["params"]
    return module, variables, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), layers)


def document_logits(module, params, tokens):
    """Give the logits of each depth for one document: those of depth k stand for token t + k + 1 at place t."""
    table = params["embed_tokens"]["embedding"]
    head = table if module.tie_embeddings else params["lm_head"]["embedding"]
    x = table[tokens]
    for index, spec in enumerate(module.layers):
        x = slow_decoder.layer(spec, params[f"layers_{index}"], x)
    x = slow_decoder.norm(module.norm, params["norm"], x)
    scores = [x @ head.T * module.head.scale]
    for depth in range(1, module.prediction.depth + 1):
        own = params[f"prediction_{depth - 1}"]
        ends = params["prediction_0"] if module.prediction.is_shared else own
        rows = []
        for place in range(len(tokens) - depth):
            embedded = slow_decoder.norm(module.norm, ends["embedding_norm"], table[tokens[place + depth]])
            hidden = slow_decoder.norm(module.norm, ends["hidden_norm"], x[place])
            rows.append(np.concatenate([embedded, hidden]) @ ends["proj"]["kernel"].reshape(-1, module.features))
        if not rows:
            break
        x = slow_decoder.layer(module.prediction.layer, own["block"], np.stack(rows))
        normed = slow_decoder.norm(module.norm, ends["norm"], x)
        x = normed if module.prediction.is_shared else x
        scores.append(normed @ head.T * module.head.scale)
    return scores


def documents(batch):
    """List row, first and last place of each document of a packed batch."""
    for row, segments in enumerate(batch["segment_ids"]):
        borders = [0, *(np.flatnonzero(np.diff(segments)) + 1), len(segments)]
        for first, last in itertools.pairwise(borders):
            if segments[first]:
                yield row, first, last


def entropy(scores, target):
    return np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[target]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("fields", [{}, {"tie_embeddings": False, "head": HeadSpec(scale=0.5)}], ids=["tied", "untied"])
def test_logits_and_loss_of_packed_documents_are_the_slow_ones(is_shared, fields):
    module, variables, params = model(is_shared, **fields)
    batch = packed_batch()
    objective = LanguageModel(module, mtp_weight=WEIGHT)
    prepared = objective.prepare(batch)
    around = {"positions": prepared["positions"], "segment_ids": prepared["segment_ids"]}
    hidden = module.apply(variables, prepared["inputs"], **around, method="hidden_states")
    further = [
        {"tokens": prepared[t], "segment_ids": prepared[f"segment_ids_{k}"], "weights": prepared[f"weights_{k}"]}
        for k, t in ((1, "targets"), (2, "targets_1"))
    ]
    read, routing = module.apply(variables, hidden, further, prepared["positions"], method="further_hidden_states")
    assert routing == ()
    got = [np.asarray(module.logits(variables, each)) for each in (hidden, *read)]
    totals, counts, compared = np.zeros(3), np.zeros(3, int), np.zeros(3, int)
    for row, first, last in documents(batch):
        tokens, mask = batch["tokens"][row, first:last], batch["loss_mask"][row, first:last]
        for depth, scores in enumerate(document_logits(module, params, tokens)):
            places = min(len(scores), got[depth].shape[1] - first)  # the last token of a row is no input
            mine = got[depth][row, first : first + places]
            np.testing.assert_allclose(mine, scores[:places], rtol=0, atol=1e-5 * np.abs(scores).max())
            compared[depth] += places
            for place in range(len(tokens) - depth - 1):
                if mask[place + depth + 1]:
                    totals[depth] += entropy(scores[place], tokens[place + depth + 1])
                    counts[depth] += 1
    assert compared.min() > 150
    assert len(set(counts.tolist())) == 3
    out = objective.loss(variables, prepared, key=jax.random.key(0), train=True)
    assert float(out.loss.mass) == counts[0]
    assert float(out.loss.total) == pytest.approx(totals[0] + WEIGHT * totals[1:].mean(), rel=1e-5)
    assert float(out.metrics["cross_entropy"].total) == pytest.approx(totals[0], rel=1e-5)
    reported = out.metrics["prediction_loss"]
    assert float(reported.mass) == counts[1:].sum()
    assert float(reported.total) == pytest.approx(totals[1:].sum(), rel=1e-5)


@pytest.mark.parametrize("fields", [("segment_ids", "loss_mask"), ("segment_ids",), ("loss_mask",), ()], ids=str)
def test_what_a_depth_reads_and_scores_is_the_definition(fields):
    batch = {name: packed_batch()[name] for name in ("tokens", *fields)}
    tokens, length = batch["tokens"], batch["tokens"].shape[1] - 1
    segments = batch.get("segment_ids", np.ones_like(tokens))
    mask = batch.get("loss_mask", np.ones(tokens.shape, bool))
    prepared = LanguageModel(model()[0]).prepare(batch)
    for depth in (1, 2):
        padding = prepared.get(f"segment_ids_{depth}")
        assert (padding is None) == (depth == 1 and "segment_ids" not in fields)
        for row, place in np.ndindex(len(tokens), length):
            read = segments[row, place : place + depth + 1]
            reads = len(read) == depth + 1 and len(set(read.tolist())) == 1 and read[0] > 0
            target = place + depth + 1
            scores = reads and target <= length and segments[row, target] == read[0] and mask[row, target]
            assert prepared[f"weights_{depth}"][row, place] == scores
            assert not scores or prepared[f"targets_{depth}"][row, place] == tokens[row, target]
            assert padding is None or padding[row, place] == (segments[row, place] if reads else 0)


def test_rows_shorter_than_the_depth_predict_nothing_further():
    module, variables, _ = model()
    objective = LanguageModel(module)
    out = objective.loss(variables, objective.prepare({"tokens": np.array([[3, 4]])}), key=None, train=False)
    assert (float(out.loss.mass), float(out.metrics["prediction_loss"].mass)) == (1, 0)
    assert np.isfinite(out.loss.total)


def test_a_weight_of_zero_computes_nothing_of_them():
    module, variables, _ = model()
    plain = module.clone(prediction=None)
    rest = {"params": {name: part for name, part in variables["params"].items() if "prediction" not in name}}
    off, without, on = LanguageModel(module, mtp_weight=0), LanguageModel(plain), LanguageModel(module)
    batch = off.prepare(packed_batch())
    assert batch.keys() == without.prepare(packed_batch()).keys()
    got = off.loss(variables, batch, key=jax.random.key(0), train=True)
    want = without.loss(rest, batch, key=jax.random.key(0), train=True)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    np.testing.assert_array_equal(module.apply(variables, batch["inputs"]), plain.apply(rest, batch["inputs"]))
    default = on.loss(variables, on.prepare(packed_batch()), key=jax.random.key(0), train=True)
    explicit = LanguageModel(module, mtp_weight=0.1)
    same = explicit.loss(variables, explicit.prepare(packed_batch()), key=jax.random.key(0), train=True)
    assert float(default.loss.total) == float(same.loss.total) > float(want.loss.total)


def test_what_cannot_be_is_refused_by_name():
    module = model()[0]
    with pytest.raises(ValueError, match=r"this module has none.*prediction. Received: mtp_weight=0\.2"):
        LanguageModel(tiny_decoder(), mtp_weight=0.2)
    with pytest.raises(ValueError, match=r"mtp_weight must be a finite number of 0 or more. Received: mtp_weight=-1"):
        LanguageModel(module, mtp_weight=-1)
    with pytest.raises(ValueError, match=r"depth must be a positive whole number.* Received: 0"):
        PredictionSpec(layer=tiny_layer(), depth=0)
    with pytest.raises(ValueError, match=r"schedule='1f1b' scores between .* Use schedule='gpipe', or prediction=None"):
        module.clone(schedule="1f1b")


def test_initial_values_are_those_of_a_model_without():
    want = tiny_decoder(num_layers=2).init(jax.random.key(3), jnp.zeros((1, 1), jnp.int32))["params"]
    spec = PredictionSpec(layer=tiny_layer(), depth=2, is_shared=True)
    got = tiny_decoder(num_layers=2, prediction=spec).init(jax.random.key(3), jnp.zeros((1, 1), jnp.int32))["params"]
    jax.tree.map(np.testing.assert_array_equal, {name: got[name] for name in want}, dict(want))
    assert set(got) - set(want) == {"prediction_0", "prediction_1"}
    assert set(got["prediction_1"]) == {"block"}
    first, second = (got[f"prediction_{k}"]["block"]["mlp"]["up_proj"]["kernel"].value for k in (0, 1))
    assert np.abs(first - second).max() > 0.01
