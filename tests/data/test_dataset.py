"""Global batch k holds the same records at every process count, and a stream resumes where it stopped."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dew.data.dataset import Dataset
from dew.data.global_batch import shuffled_order, with_zero_weight
from dew.placement.partition import DataPartition


def numbers(count):
    return {"x": np.arange(count), "y": np.arange(count) * 2.0}


def take(stream, count):
    return list(itertools.islice(stream, count))


def real_records(*shares):
    """The records of one global batch that carry weight, from all its shares."""
    return sorted(
        int(x) for share in shares for x, weight in zip(share["x"], share["sample_weight"], strict=True) if weight
    )


@given(st.integers(1, 40), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.integers(0, 5))
def test_batches_hold_the_same_records_at_every_process_count(records, count, multiple, seed):
    dataset = Dataset.from_records(numbers(records), batch=8 * multiple, seed=seed)
    steps = 2 * dataset.steps_per_epoch + 1
    whole = take(dataset.train(DataPartition()), steps)
    shares = [take(dataset.train(DataPartition(index, count)), steps) for index in range(count)]
    for step in range(steps):
        assert real_records(*(share[step] for share in shares)) == real_records(whole[step])
        assert {len(share[step]["x"]) for share in shares} == {8 * multiple // count}


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 5))
def test_every_epoch_holds_every_record_once_in_its_own_order(records, batch, seed):
    dataset = Dataset.from_records(numbers(records), batch=batch, seed=seed)
    stream = dataset.train(DataPartition())
    for epoch in range(3):
        batches = take(stream, dataset.steps_per_epoch)
        order = [int(x) for b in batches for x, weight in zip(b["x"], b["sample_weight"], strict=True) if weight]
        assert order == shuffled_order(records, seed=seed, epoch=epoch).tolist()
        assert sorted(order) == list(range(records))


def test_epochs_and_seeds_differ():
    orders = {tuple(shuffled_order(50, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@given(st.integers(0, 13), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_a_resumed_stream_equals_an_uninterrupted_one(stop, before, after):
    dataset = Dataset.from_records(numbers(21), batch=4, seed=3)
    first = dataset.train(DataPartition(0, before))
    take(first, stop)
    state = json.loads(json.dumps(first.get_state()))
    resumed = dataset.train(DataPartition(0, after))
    resumed.set_state(state)
    want = dataset.train(DataPartition(0, after))
    take(want, stop)
    for got, expected in zip(take(resumed, 9), take(want, 9), strict=True):
        assert {key: value.tolist() for key, value in got.items()} == {k: v.tolist() for k, v in expected.items()}


def test_a_position_of_other_data_is_refused_and_changes_nothing():
    stream = Dataset.from_records(numbers(21), batch=4, seed=3).train(DataPartition())
    take(stream, 2)
    for change, message in [
        ({"batch": 8}, r"batch 8 \(here 4\)"),
        ({"seed": 4}, "seed 4"),
        ({"records": 20}, "records 20"),
    ]:
        with pytest.raises(ValueError, match=message):
            stream.set_state({**stream.get_state(), "batches": 1, **change})
    with pytest.raises(ValueError, match="batches -1"):
        stream.set_state({**stream.get_state(), "batches": -1})
    assert stream.get_state()["batches"] == 2


def test_validation_keeps_its_order_and_ends():
    dataset = Dataset.from_records(numbers(4), batch=4, validation=numbers(6))
    for _ in range(2):
        batches = list(dataset.val(DataPartition()))
        assert [b["x"].tolist()[:2] for b in batches] == [[0, 1], [4, 5]]
        assert [b["sample_weight"].tolist() for b in batches] == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert Dataset.from_records(numbers(4), batch=4).val is None


def test_streams_are_fresh():
    dataset = Dataset.from_records(numbers(9), batch=3)
    first, second = dataset.train(DataPartition()), dataset.train(DataPartition())
    assert take(first, 2)[0]["x"].tolist() == take(second, 1)[0]["x"].tolist()


def test_filling_rows_carry_no_weight():
    tokens = {"tokens": np.ones((3, 4), int), "loss_mask": np.array([[0, 1, 1, 0]] * 3, bool)}
    filled = with_zero_weight(tokens, 2)
    assert filled["loss_mask"].tolist() == [[False, True, True, False]] * 2 + [[False] * 4]
    assert tokens["loss_mask"][2].any()
    assert with_zero_weight({"tokens": np.ones((2, 4), int)}, 1)["loss_mask"].tolist() == [[True] * 4, [False] * 4]
    weighted = with_zero_weight({"x": np.ones((3, 2)), "sample_weight": np.array([2.0, 3.0, 4.0])}, 1)
    assert weighted["sample_weight"].tolist() == [2.0, 0.0, 0.0]
    assert "sample_weight" in with_zero_weight({"x": np.ones((3, 2))}, 3)


def test_records_may_be_a_sequence_of_dicts():
    arrays = Dataset.from_records(numbers(7), batch=3, seed=1)
    listed = Dataset.from_records([{"x": n, "y": n * 2.0} for n in range(7)], batch=3, seed=1)
    for got, want in zip(take(listed.train(DataPartition()), 5), take(arrays.train(DataPartition()), 5), strict=True):
        assert {key: value.tolist() for key, value in got.items()} == {k: v.tolist() for k, v in want.items()}


@pytest.mark.parametrize("records", [{}, [], {"x": np.zeros((0, 3))}])
def test_empty_data_is_refused(records):
    with pytest.raises(ValueError, match="There is no data: the training data has 0 records"):
        Dataset.from_records(records, batch=2)
    with pytest.raises(ValueError, match="There is no data: the validation data has 0 records"):
        Dataset.from_records(numbers(3), batch=2, validation=records)


def test_wrong_data_and_batches_are_refused():
    with pytest.raises(ValueError, match=r"must have one length. Received: \{'x': 3, 'y': 2\}"):
        Dataset.from_records({"x": np.zeros(3), "y": np.zeros(2)}, batch=2)
    with pytest.raises(TypeError, match="Received for the training data: int"):
        Dataset.from_records(3, batch=2)
    with pytest.raises(ValueError, match="Received: batch=0"):
        Dataset.from_records(numbers(3), batch=0)
    with pytest.raises(
        ValueError, match=r"6 rows does not divide into 4 equal shares\. Use a multiple of 4, such as 8"
    ):
        Dataset.from_records(numbers(30), batch=6).train(DataPartition(0, 4))
