"""First fit, by comparison with a slow loop; every document whole, once, with its own positions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dew.data.packing import Document, fill_rows, plan_rows

WIDTH = 12
LENGTHS = st.lists(st.integers(1, WIDTH), max_size=30)


def slow_first_fit(lengths, width):
    rows = []
    for number, length in enumerate(lengths):
        for row in rows:
            if sum(lengths[other] for other in row) + length <= width:
                row.append(number)
                break
        else:
            rows.append([number])
    return rows


@given(LENGTHS)
def test_rows_are_those_of_a_slow_first_fit(lengths):
    assert plan_rows(lengths, WIDTH, packing=True) == slow_first_fit(lengths, WIDTH)


@given(LENGTHS)
def test_without_packing_each_document_has_its_row(lengths):
    assert plan_rows(lengths, WIDTH, packing=False) == [[number] for number in range(len(lengths))]


@given(LENGTHS)
def test_every_document_is_in_the_rows_once_and_whole(lengths):
    documents = [
        Document(tokens=np.arange(length) + 100 * (number + 1), scored=np.ones(length, bool))
        for number, length in enumerate(lengths)
    ]
    filled = fill_rows(documents, plan_rows(lengths, WIDTH, packing=True), WIDTH, pad_id=7)
    found = []
    for row in range(len(filled["tokens"])):
        tokens, segments = filled["tokens"][row], filled["segment_ids"][row]
        for segment in range(1, segments.max() + 1):
            place = np.flatnonzero(segments == segment)
            assert np.array_equal(place, np.arange(place[0], place[-1] + 1))
            assert np.array_equal(filled["positions"][row, place], np.arange(len(place)))
            assert filled["loss_mask"][row, place].tolist() == [False] + [True] * (len(place) - 1)
            found.append(tokens[place].tolist())
        assert (tokens[segments == 0] == 7).all()
        assert not filled["loss_mask"][row, segments == 0].any()
    assert sorted(found) == [document.tokens.tolist() for document in documents]


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="Document 1 has 13 tokens, more than a row of 12"):
        plan_rows([3, 13], WIDTH, packing=True)
