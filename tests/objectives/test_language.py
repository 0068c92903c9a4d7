"""Which tokens are scored, with what loss, and which batches are refused."""

import jax
import numpy as np
import pytest

from dew.objectives.base import Ratio
from dew.objectives.language import LanguageModel, positions_in_segments
from tests.tiny import VOCAB_SIZE, tiny_batch, tiny_decoder

OBJECTIVE = LanguageModel(tiny_decoder(num_layers=2))


def slow_loss(variables, batch):
    """Score token by token in float64, straight from the definition."""
    total, count, correct = 0.0, 0, 0
    segments = batch.get("segment_ids")
    logits = np.asarray(
        OBJECTIVE.module.apply(
            variables,
            batch["tokens"][:, :-1],
            segment_ids=None if segments is None else segments[:, :-1],
            positions=None if segments is None else positions_in_segments(segments)[:, :-1],
        ),
        np.float64,
    )
    mask = batch.get("loss_mask", np.ones(batch["tokens"].shape, bool))
    for row, tokens in enumerate(batch["tokens"]):
        for at in range(1, len(tokens)):
            same = segments is None or segments[row, at] == segments[row, at - 1] != 0
            if mask[row, at] and same:
                scores = logits[row, at - 1]
                total += np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[tokens[at]]
                correct += scores.argmax() == tokens[at]
                count += 1
    return total, count, correct


def packed_batch():
    batch = tiny_batch(rows=3, length=16)
    batch["segment_ids"] = np.asarray([[1] * 5 + [2] * 9 + [0] * 3, [1] * 17, [1] * 2 + [2] * 15], np.int32)
    batch["loss_mask"][:] = True
    return batch


@pytest.mark.parametrize(
    "batch", [tiny_batch(), packed_batch(), {"tokens": tiny_batch()["tokens"]}], ids=["masked", "packed", "plain"]
)
def test_the_loss_is_the_definition(batch):
    variables = jax.jit(lambda key: OBJECTIVE.init(key))(jax.random.key(1))
    variables = jax.tree.map(lambda x: x * 3, variables)  # sharper than an untrained model's guesses
    out = OBJECTIVE.loss(variables, OBJECTIVE.prepare(batch), key=jax.random.key(0), train=False)
    total, count, correct = slow_loss(variables, batch)
    assert float(out.loss.total) == pytest.approx(total, rel=1e-5)
    assert float(out.loss.mass) == count > 0
    assert float(out.metrics["token_accuracy"].total) == correct
    assert float(out.metrics["token_accuracy"].mass) == count


def test_documents_packed_in_a_row_score_as_they_do_alone():
    variables = OBJECTIVE.init(jax.random.key(1))
    batch = packed_batch()

    def total(batch):
        return float(OBJECTIVE.loss(variables, OBJECTIVE.prepare(batch), key=jax.random.key(0), train=False).loss.total)

    alone = sum(total({"tokens": batch["tokens"][:1, span]}) for span in (slice(0, 5), slice(5, 14)))
    packed = {name: value[:1] for name, value in batch.items()}
    assert total(packed) == pytest.approx(alone, rel=1e-5)


def test_positions_start_again_in_each_document():
    got = positions_in_segments(np.asarray([[1, 1, 1, 2, 2, 0], [1, 2, 3, 3, 3, 3]]))
    assert got.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]


def test_the_report_takes_the_exponential_of_the_pooled_loss():
    report = OBJECTIVE.report({"loss": Ratio(30.0, 10.0), "token_accuracy": Ratio(4.0, 10.0)})
    assert report == pytest.approx({"loss": 3.0, "token_accuracy": 0.4, "perplexity": np.exp(3.0)})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"loss_masks": np.ones((8, 17))}, "Did you mean 'loss_mask'"),
        ({"loss_mask": np.ones((8, 16))}, r"loss_mask must have the shape of tokens, \(8, 17\)"),
        ({"tokens": np.full((8, 17), VOCAB_SIZE)}, r"\[0, 64\).*from 64 to 64"),
        ({"tokens": np.full((8, 17), -1)}, "from -1 to -1"),
        ({"tokens": np.ones((8, 17))}, "must be integers.*float64"),
        ({"tokens": np.ones((8, 1), int)}, "T >= 1"),
        ({"tokens": np.ones((8, 66), int)}, "65 positions exceed the model's context of 64"),
    ],
)
def test_a_batch_that_cannot_be_meant_is_refused(change, message):
    batch = {**tiny_batch(), **change}
    if change.get("tokens") is not None:
        del batch["loss_mask"]
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.prepare(batch)


def test_a_batch_without_tokens_is_refused():
    with pytest.raises(ValueError, match="needs the field 'tokens'"):
        OBJECTIVE.prepare({"loss_mask": np.ones((2, 3))})
