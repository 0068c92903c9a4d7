"""Timetables: every microbatch passes every stage once each way, in order, within the memory and idle time stated."""

import numpy as np
import pytest

from dew.parallel.schedules import IDLE, SCHEDULES, one_f_one_b_timetable

SIZES = [(1, 1), (2, 2), (2, 3), (3, 3), (4, 1), (4, 3), (4, 4), (4, 18), (8, 32)]


def ticks_of(entries, microbatches):
    """Give the tick of each microbatch on each stage, [microbatches, stages]; fails where one has not exactly one."""
    found = np.stack([entries == m for m in range(microbatches)])
    assert (found.sum(axis=1) == 1).all(), "a microbatch passes a stage once"
    return found.argmax(axis=1)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages, microbatches", SIZES)
def test_every_microbatch_passes_each_stage_once_each_way_in_order(name, stages, microbatches):
    table = SCHEDULES[name].timetable(stages, microbatches)
    forward, backward = (ticks_of(entries, microbatches) for entries in (table.forward, table.backward))
    assert ((table.forward == IDLE) | (table.forward >= 0)).all()
    # One hop takes one tick, because the hand-over follows the tick.
    assert (np.diff(forward, axis=1) == 1).all()
    assert (np.diff(backward, axis=1) == -1).all()
    # A stage may turn around within a tick: it runs forward first.
    assert (backward >= forward).all()
    assert (table.num_stages, table.num_microbatches) == (stages, microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages, microbatches", SIZES)
def test_the_idle_share_is_the_published_one_whatever_a_backward_pass_costs(name, stages, microbatches):
    table = SCHEDULES[name].timetable(stages, microbatches)
    for cost in (1.0, 2.0, 3.5):
        assert table.bubble(cost) == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize("stages, microbatches", SIZES)
def test_one_f_one_b_has_as_many_places_whatever_the_microbatches_and_reads_what_it_kept(stages, microbatches):
    table = one_f_one_b_timetable(stages, microbatches)
    assert table.slots == 2 * stages - 1
    places = np.full((table.slots, stages), IDLE)
    for tick, (forward, backward) in enumerate(zip(table.forward, table.backward, strict=True)):
        places[tick % table.slots] = forward  # idle stages write too
        read = places[table.read_slots[tick], np.arange(stages)]
        assert (read == backward)[backward != IDLE].all()
