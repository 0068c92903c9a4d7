"""Batches of a PyDataset come in order whatever its workers do, each once, and none after a pass is left."""

import threading
import time

import keras
import numpy as np
import pytest

from dew_keras.inputs import RowSharing
from dew_keras.prefetch import fetched
from dew_keras.streams import keras_source


class Slow(keras.utils.PyDataset):
    """Later batches are ready sooner; writes down who asked for what."""

    def __init__(self, batches=6, **options):
        super().__init__(**options)
        self.batches, self.asked, self.threads = batches, [], set()

    @property
    def num_batches(self):
        """Batches of a pass."""
        return self.batches

    def __getitem__(self, number):
        """Make a batch."""
        self.asked.append(number)
        self.threads.add(threading.current_thread().name)
        time.sleep(0.01 * (self.batches - number))
        if number == 4:
            time.sleep(0.05)
        return (np.full((2, 1), number, np.float32),)


def numbers(dataset, start=0):
    source = keras_source(dataset, batch_size=None, sharing=RowSharing())
    return [int(batch.data["x"][0, 0]) for batch in source.open(0, start)]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("start", [0, 2])
def test_batches_come_in_order_each_once(workers, start):
    dataset = Slow(workers=workers, max_queue_size=3)
    assert numbers(dataset, start) == list(range(start, 6))
    assert sorted(dataset.asked) == list(range(start, 6))
    assert (len(dataset.threads) > 1) is (workers > 1)


def test_no_more_than_the_queue_is_fetched_ahead_and_leaving_stops_it():
    dataset = Slow(batches=40, workers=2, max_queue_size=3)
    items = fetched(dataset, range(40))
    assert int(next(items)[0][0, 0]) == 0
    items.close()
    assert len(dataset.asked) <= 3


def test_an_error_in_a_worker_is_the_user_s():
    class Broken(Slow):
        def __getitem__(self, number):
            raise KeyError("row 7 is missing")

    with pytest.raises(KeyError, match="row 7 is missing"):
        numbers(Broken(workers=2))


def test_processes_are_threads_and_it_says_so():
    with pytest.warns(UserWarning, match="use_multiprocessing=True"):
        assert numbers(Slow(workers=2, use_multiprocessing=True)) == list(range(6))
