"""Every form of data gives each row once, pads what does not divide with zero weight, and says what is wrong."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import dew_keras
from dew.placement.partition import DataPartition, WholeBatch
from dew_keras.arrays import count_rows, keras_arrays
from dew_keras.inputs import ArraySource, RowSharing
from dew_keras.streams import SlicedSource, keras_source
from tests.dew_keras.nets import Linear, refused, rows, twins

ON_EIGHT = RowSharing(divisor=8)


def taken(source, epoch=0):
    return [(batch.rows, batch.data) for batch in source.open(epoch)]


@pytest.mark.parametrize("divisor", [1, 4, 8])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 32])
def test_each_row_is_taken_once_and_filling_weighs_nothing(batch_size, divisor):
    x = np.arange(10, dtype="float32")[:, None]
    source = keras_source(x, x, batch_size=batch_size, sharing=RowSharing(divisor), seed=0)
    batches = taken(source, epoch=2)
    assert len(batches) == source.steps == -(-10 // batch_size)
    assert len({batch["x"].shape for _, batch in batches}) == 1, "one shape compiles once"
    real = []
    for count, batch in batches:
        assert len(batch["x"]) % divisor == 0
        mask = batch.get("rows", np.ones(len(batch["x"])))
        assert mask.sum() == count
        real.extend(batch["x"][mask > 0, 0])
    assert sorted(real) == list(range(10))


def test_an_epoch_has_its_own_order_which_the_seed_decides():
    x = np.arange(32, dtype="float32")[:, None]

    def order(seed, epoch):
        source = keras_source(x, batch_size=8, sharing=ON_EIGHT, seed=seed)
        return np.concatenate([batch["x"][:, 0] for _, batch in taken(source, epoch)]).tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(None, 0) == order(None, 5) == list(range(32))


def test_processes_take_disjoint_shares_of_the_same_batches():
    x = np.arange(24, dtype="float32")[:, None]
    whole = keras_source(x, batch_size=8, sharing=ON_EIGHT, seed=3)
    shares = [keras_source(x, batch_size=8, sharing=RowSharing(8, DataPartition(index, 2)), seed=3) for index in (0, 1)]
    for (_, batch), *parts in zip(taken(whole), *(taken(share) for share in shares), strict=True):
        np.testing.assert_array_equal(np.concatenate([part["x"] for _, part in parts]), batch["x"])


def test_where_rows_may_meet_a_batch_that_does_not_divide_is_given_whole_to_every_process():
    x = np.arange(11, dtype="float32")[:, None]
    sharing = RowSharing(8, DataPartition(1, 2), fills=False)
    (_, first), (count, last) = taken(keras_source(x, batch_size=8, sharing=sharing))
    np.testing.assert_array_equal(first["x"], x[4:8])
    assert (type(first), type(last), count, last.keys()) == (dict, WholeBatch, 3, {"x"})
    np.testing.assert_array_equal(last["x"], x[8:])


def test_steps_per_epoch_goes_on_where_the_last_epoch_stopped():
    x = np.arange(10, dtype="float32")[:, None]
    source = SlicedSource(keras_source(x, batch_size=2, sharing=RowSharing()), 3)
    epochs = [np.concatenate([batch["x"][:, 0] for _, batch in taken(source, epoch)]) for epoch in range(2)]
    np.testing.assert_array_equal(np.concatenate(epochs), [*range(10), 0, 1])


class Batches(keras.utils.PyDataset):
    def __init__(self, arrays, size):
        super().__init__()
        self.arrays, self.size, self.calls = arrays, size, []

    def __len__(self):
        return -(-len(self.arrays[0]) // self.size)

    def __getitem__(self, index):
        return tuple(array[index * self.size : (index + 1) * self.size] for array in self.arrays)

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")


def test_batches_of_a_dataset_have_an_order_of_their_own_in_every_epoch():
    x = np.arange(24, dtype="float32")[:, None]

    def order(seed, epoch, start=0, peeks=False):
        dataset = Batches((x,), 2)
        source = keras_source(dataset, batch_size=None, sharing=RowSharing(), seed=seed)
        if peeks:
            source.example()
        found = [int(batch.data["x"][0, 0]) // 2 for batch in source.open(epoch, start)]
        assert dataset.calls == ["begin", "end"]
        return found

    assert order(None, 3) == list(range(12)) == sorted(order(0, 3))
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    # The batch that was taken for its shapes stands where the order puts it, whatever epoch begins, and in the middle.
    for epoch in (0, 3):
        assert order(0, epoch, peeks=True) == order(0, epoch)
        assert order(0, epoch, 5, peeks=True) == order(0, epoch)[5:]


@pytest.mark.parametrize("workers", [1, 3])
def test_fit_shuffles_the_batches_of_a_dataset_as_keras_does_and_evaluate_does_not(workers):
    x, y, _ = rows(16)

    class Numbered(Batches):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    for model in twins(optimizer="sgd", loss="mse"):
        dataset = Numbered((x, y), 2)
        dataset.workers = workers
        seen, taken_by_shuffle = [], {}
        for shuffle in (True, False):
            seen.clear()
            model.fit(dataset, epochs=2, verbose=0, shuffle=shuffle)
            taken_by_shuffle[shuffle] = seen[-8:]
            assert sorted(seen[-8:]) == list(range(8))
        seen.clear()
        model.evaluate(dataset, verbose=0)
        if workers == 1:
            assert taken_by_shuffle[True] != list(range(8)) == taken_by_shuffle[False] == seen[-8:]


def test_datasets_generators_and_iterables_train_as_arrays_do():
    x, y, weight = rows(10)

    class Loader:
        def __iter__(self):
            return ([a[i : i + 4] for a in (x, y, weight)] for i in range(0, 10, 4))

    want = twins(optimizer="sgd", loss="mse")[0].fit(x, y, 4, 2, 0, sample_weight=weight, shuffle=False).history
    dataset = Batches((x, y, weight), 4)
    for data in (dataset, Loader()):
        got = twins(optimizer="sgd", loss="mse")[0].fit(data, epochs=2, verbose=0, shuffle=False).history
        np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
    assert dataset.calls == ["begin", "end"] * 2
    endless = (tuple(batch) for _ in range(9) for batch in Loader())
    got = twins(optimizer="sgd", loss="mse")[0].fit(endless, epochs=2, steps_per_epoch=3, verbose=0).history
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
    assert len(next(endless)[0]) == 4, "no batch beyond those trained on was taken"


def test_a_dataset_may_give_the_inputs_alone_as_in_keras():
    x, _, _ = rows(10)

    class Inputs(Batches):
        def __getitem__(self, index):
            return super().__getitem__(index)[0]

    ours, theirs = twins(optimizer="sgd", loss="mse")
    np.testing.assert_allclose(
        ours.predict(Inputs((x,), 4), verbose=0), theirs.predict(Inputs((x,), 4), verbose=0), rtol=1e-5, atol=1e-6
    )


def test_validation_split_is_the_end_of_the_rows_before_shuffling():
    x, y, _ = rows(10)
    split = twins(optimizer="sgd", loss="mse")[0].fit(x, y, 4, 1, 0, validation_split=0.3).history
    given = twins(optimizer="sgd", loss="mse")[0]
    given = given.fit(x[:7], y[:7], 4, 1, 0, validation_data=(x[7:], y[7:])).history
    np.testing.assert_allclose(split["val_loss"], given["val_loss"], rtol=1e-6)


X, Y, W = rows(6)


@pytest.fixture(scope="module")
def trained():
    """A model in the middle of its training; what is refused leaves it there."""
    model, _ = twins(optimizer="adam", loss="mse")
    model.fit(X, Y, verbose=0)
    return model


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"x": X, "y": Y[:5]}, r"cardinality is ambiguous.*'x' sizes: 6, 'y' sizes: 5"),
        ({"x": X[:0], "y": Y[:0]}, r"no data: the arrays have no rows"),
        ({"x": [1, 2, 3], "y": Y}, r"Unrecognized data type"),
        ({"x": (pair for pair in [(X, Y)]), "y": Y}, r"`y` goes with arrays; a generator"),
        ({"x": (pair for pair in [[X, Y]])}, r"must give tuples \(x,\)"),
        ({"x": (pair for pair in [])}, r"generator is spent"),
        ({"x": X, "y": Y, "validation_split": 1.5}, r"validation_split=1.5"),
        ({"x": X, "y": Y, "validation_data": (X, Y, W, W)}, r"a tuple of 4"),
        ({"x": X, "y": Y, "validation_freq": (1, 2)}, r"validation_freq"),
        ({"x": X, "y": Y, "batch_size": -1}, r"batch_size=-1"),
        ({"x": X, "y": Y, "batch_size": 0}, r"batch_size=0"),
        ({"x": X, "y": Y, "validation_data": (X, Y), "validation_steps": 0}, r"validation_steps=0"),
        ({"x": X, "y": Y, "steps_per_epoch": -1}, r"steps_per_epoch=-1"),
        ({"x": X, "y": Y, "sample_weight": W, "class_weight": {0: 1.0}}, r"class_weight"),
        ({"x": np.asarray(["a", "b"]), "y": Y[:2]}, r"must hold numbers"),
        ({"x": X, "y": {"a": Y, "b": Y}}, r"y must have the structure of the model's outputs"),
        ({"x": X}, r"needs targets, and y is missing"),
    ],
)
def test_data_that_does_not_fit_is_refused(arguments, text, trained):
    with refused(trained, text):
        trained.fit(**arguments, verbose=0)


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_a_pass_of_no_batches_is_refused(steps):
    model, _ = twins(optimizer="sgd", loss="mse")
    for verb in (lambda: model.evaluate(X, Y, steps=steps), lambda: model.predict(X, steps=steps)):
        with pytest.raises(ValueError, match=f"steps must be a positive integer. Received: steps={steps}"):
            verb()


def test_a_limited_pass_takes_no_batch_beyond_its_last():
    model, _ = twins(optimizer="sgd", loss="mse")
    batches = ((X[at : at + 2], Y[at : at + 2]) for at in (0, 2, 4))
    model.evaluate(batches, steps=2, verbose=0)
    np.testing.assert_array_equal(next(batches)[0], X[4:])


def test_a_source_of_token_rows_clears_the_mask_of_filling():
    tokens = np.ones((5, 4), np.int32)
    source = ArraySource({"tokens": tokens}, batch_size=4, sharing=RowSharing(4))
    _, (count, last) = taken(source)
    assert count == 1
    assert last["loss_mask"].sum() == 4
    assert last["loss_mask"][0].all()


class Frame:
    """What holds its numbers as pandas does."""

    def __init__(self, values):
        self.values, self.shape = values, values.shape

    def __array__(self, dtype=None, copy=None):
        """Give the numbers."""
        return np.asarray(self.values, dtype)

    def __len__(self):
        """Count rows."""
        return len(self.values)


@pytest.mark.parametrize("make", [jnp.asarray, Frame, lambda x: x.astype("float64")], ids=["jax", "frame", "float64"])
def test_arrays_of_other_libraries_are_read(make):
    x, y, weight = rows(10)
    arrays = keras_arrays(make(x), {"a": make(y)}, [make(weight)])
    assert all(type(leaf) is np.ndarray and leaf.dtype == np.float32 for leaf in jax.tree.leaves(arrays))
    np.testing.assert_array_equal(arrays["x"], x)
    np.testing.assert_array_equal(arrays["y"]["a"], y)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((np.zeros((0, 4)), np.zeros((0, 3))), "no rows"),
        ((np.zeros((4, 4)), np.zeros((3, 3))), "Data cardinality is ambiguous"),
        ((np.zeros((2, 4)), [1.0, 2.0]), r"\['y'\] hold lone numbers"),
        ((np.zeros((2, 4)), np.zeros(2), 2.0), r"\['sample_weight'\] hold lone numbers"),
        ((np.array(["a", "b"]), np.zeros(2)), "must hold numbers"),
        ((np.zeros((2, 4)), np.zeros(2), None, [1.0, 2.0]), "`class_weight` maps class numbers"),
    ],
)
def test_arrays_that_cannot_be_rows_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        count_rows(keras_arrays(*arguments))


def test_targets_that_go_missing_are_named():
    x, y, _ = rows(8)
    model = dew_keras.Model(Linear())
    model.compile("sgd", "mse", mesh={"data": 8})
    model.evaluate(x, y, verbose=0)
    with pytest.raises(ValueError, match="needs targets, and y is missing"):
        model.evaluate(x, verbose=0)
