"""Every metric gives Keras' number over ragged batches and meshes, and its object holds it after the pass."""

import flax.linen as nn
import jax
import keras
import numpy as np
import pytest

import dew_keras
from dew.objectives.base import Ratio
from dew_keras.callbacks import RunningLogs
from dew_keras.metrics import MetricSet
from dew_keras.outputs import Output
from dew_keras.pooling import FED_ROWS, is_additive
from tests.dew_keras.nets import rows, twins

RNG = np.random.default_rng(5)
SCORES = RNG.dirichlet(np.ones(3), 10).astype("float32")
LABELS = RNG.integers(0, 3, 10)
WEIGHTS = RNG.uniform(0.1, 2, 10).astype("float32")
REAL = (RNG.normal(size=(10, 3)).astype("float32"), RNG.normal(size=(10, 3)).astype("float32"))
ONE_HOT = (np.eye(3, dtype="float32")[LABELS], SCORES)
SPARSE = (LABELS.astype("int32"), SCORES)
BINARY = ((LABELS[:, None] > 0).astype("float32"), SCORES[:, :1])
CLASSES = (LABELS.astype("int32"), RNG.integers(0, 3, 10).astype("int32"))

M = keras.metrics
# Every public class, with data that it is made for.
DATA = {
    M.AUC: (lambda: M.AUC(num_thresholds=9, name="m"), BINARY),
    M.Accuracy: (M.Accuracy, CLASSES),
    M.BinaryAccuracy: (M.BinaryAccuracy, BINARY),
    M.BinaryCrossentropy: (M.BinaryCrossentropy, BINARY),
    M.BinaryIoU: (M.BinaryIoU, BINARY),
    M.CategoricalAccuracy: (M.CategoricalAccuracy, ONE_HOT),
    M.CategoricalCrossentropy: (M.CategoricalCrossentropy, ONE_HOT),
    M.CategoricalHinge: (M.CategoricalHinge, ONE_HOT),
    M.ConcordanceCorrelation: (M.ConcordanceCorrelation, REAL),
    M.CosineSimilarity: (M.CosineSimilarity, REAL),
    M.F1Score: (lambda: M.F1Score(average="macro"), ONE_HOT),
    M.FBetaScore: (lambda: M.FBetaScore(average="weighted", beta=0.5), ONE_HOT),
    M.FalseNegatives: (M.FalseNegatives, BINARY),
    M.FalsePositives: (M.FalsePositives, BINARY),
    M.Hinge: (M.Hinge, BINARY),
    M.IoU: (lambda: M.IoU(num_classes=3, target_class_ids=[0, 2]), CLASSES),
    M.KLDivergence: (M.KLDivergence, ONE_HOT),
    M.LogCoshError: (M.LogCoshError, REAL),
    M.Mean: (M.Mean, (REAL[0], np.abs(REAL[1]))),
    M.MeanAbsoluteError: (M.MeanAbsoluteError, REAL),
    M.MeanAbsolutePercentageError: (M.MeanAbsolutePercentageError, REAL),
    M.MeanIoU: (lambda: M.MeanIoU(num_classes=3), CLASSES),
    M.MeanMetricWrapper: (lambda: M.MeanMetricWrapper(keras.losses.huber, name="m"), REAL),
    M.MeanSquaredError: (M.MeanSquaredError, REAL),
    M.MeanSquaredLogarithmicError: (M.MeanSquaredLogarithmicError, ONE_HOT),
    M.OneHotIoU: (lambda: M.OneHotIoU(num_classes=3, target_class_ids=[1]), ONE_HOT),
    M.OneHotMeanIoU: (lambda: M.OneHotMeanIoU(num_classes=3), ONE_HOT),
    M.PearsonCorrelation: (M.PearsonCorrelation, REAL),
    M.Poisson: (M.Poisson, ONE_HOT),
    M.Precision: (M.Precision, BINARY),
    M.PrecisionAtRecall: (lambda: M.PrecisionAtRecall(0.5, num_thresholds=9), BINARY),
    M.R2Score: (lambda: M.R2Score(num_regressors=2), REAL),
    M.Recall: (M.Recall, BINARY),
    M.RecallAtPrecision: (lambda: M.RecallAtPrecision(0.5, num_thresholds=9), BINARY),
    M.RootMeanSquaredError: (M.RootMeanSquaredError, REAL),
    M.SensitivityAtSpecificity: (lambda: M.SensitivityAtSpecificity(0.5, num_thresholds=9), BINARY),
    M.SparseCategoricalAccuracy: (M.SparseCategoricalAccuracy, SPARSE),
    M.SparseCategoricalCrossentropy: (M.SparseCategoricalCrossentropy, SPARSE),
    M.SparseTopKCategoricalAccuracy: (lambda: M.SparseTopKCategoricalAccuracy(k=2), SPARSE),
    M.SpecificityAtSensitivity: (lambda: M.SpecificityAtSensitivity(0.5, num_thresholds=9), BINARY),
    M.SquaredHinge: (M.SquaredHinge, BINARY),
    M.Sum: (M.Sum, (REAL[0], np.abs(REAL[1]))),
    M.TopKCategoricalAccuracy: (lambda: M.TopKCategoricalAccuracy(k=2), ONE_HOT),
    M.TrueNegatives: (M.TrueNegatives, BINARY),
    M.TruePositives: (M.TruePositives, BINARY),
}


def test_every_class_of_keras_is_compared():
    classes = {kind for kind in vars(keras.metrics).values() if isinstance(kind, type)}
    assert classes == {*DATA, keras.metrics.Metric}


def pooled(metrics, weighted_metrics, y, y_pred, weight):
    """Pool batches of five rows and one of filling as a pass does, without a model."""
    measured = MetricSet(metrics, weighted_metrics, [Output((), None, y_pred.shape, y[:1])])
    running = RunningLogs(measured.values)
    mask = np.array([1, 1, 1, 1, 1, 0], "float32")
    for start in range(0, len(y), 5):
        index = np.array([0, 1, 2, 3, 4, 0]) + start
        batch = measured.statistics([y[index]], [y_pred[index]], [weight[index]], mask)
        running.add({"loss": Ratio(0.0, 1.0), **batch})
    return running.values()


# Keras counts in int64 for intersections over unions, and warns of it.
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
@pytest.mark.filterwarnings("ignore:You are passing weight as `float`")
@pytest.mark.parametrize("kind", DATA, ids=lambda kind: kind.__name__)
def test_pooling_equals_updating_batch_by_batch(kind):
    make, (y, y_pred) = DATA[kind]
    # Keras refuses these a weight beside the one that y_pred is taken for.
    takes_weights = kind not in (keras.metrics.Mean, keras.metrics.Sum)
    plain, weighted, ours, ours_weighted = make(), make(), make(), make()
    for item, name in ((ours, "plain"), (ours_weighted, "weighted")):
        item.name = name
    got = pooled([ours], [ours_weighted] if takes_weights else None, y, y_pred, WEIGHTS)
    for part in (slice(0, 5), slice(5, 10)):
        plain.update_state(y[part], y_pred[part])
        if takes_weights:
            weighted.update_state(y[part], y_pred[part], sample_weight=WEIGHTS[part])
    np.testing.assert_allclose(got["plain"], plain.result(), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(ours.result(), plain.result(), rtol=1e-6, atol=1e-7)
    if takes_weights:
        np.testing.assert_allclose(got["weighted"], weighted.result(), rtol=1e-6, atol=1e-7)


class Largest(keras.metrics.Metric):
    """The largest error, weighted where there are weights."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Keep the largest."""
        error = keras.ops.max(keras.ops.abs(y_true - y_pred), axis=-1)
        error = error if sample_weight is None else error * sample_weight
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(error)))

    def result(self):
        """Read it."""
        return self.value.value


class Last(keras.metrics.Metric):
    """The mean prediction of the last batch, and its rows."""

    def __init__(self, name="last"):
        super().__init__(name=name)
        self.value, self.count = self.add_variable((), "zeros"), self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Keep the newest."""
        self.value.assign(keras.ops.mean(y_pred))
        self.count.assign(y_pred.shape[0])

    def result(self):
        """Give two numbers."""
        return {"last_mean": self.value.value, "last_rows": self.count.value}


class Median(keras.metrics.Metric):
    """The median over every row seen, which no fixed state holds."""

    def __init__(self, name="median"):
        super().__init__(name=name)
        self.reset_state()

    def reset_state(self):
        """Forget the rows."""
        self.seen = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Keep all rows."""
        self.seen = [*self.seen, np.asarray(y_pred)[:, 0]]

    def result(self):
        """Compute it."""
        return np.median(np.concatenate(self.seen)) if self.seen else 0.0


class Doubled(keras.metrics.MeanSquaredError):
    """A class of Keras with a result of its own."""

    def result(self):
        """Square the mean."""
        return super().result() ** 2


def batch_mean(y_true, y_pred):
    """One number for a whole batch, which Keras averages over batches."""
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def worse_than_average(y_true, y_pred):
    """A number per row in which all rows of the batch enter."""
    error = keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)
    return error - keras.ops.mean(error)


OWN = [Largest, Last, lambda: Doubled(name="doubled"), lambda: batch_mean, lambda: worse_than_average]


def make_own():
    return [make() for make in OWN]


def same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("mesh", [{"data": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_metrics_that_do_not_add_up_equal_keras_on_ragged_rows(mesh):
    x, y, weight = rows()
    ours, theirs = twins(
        optimizer=lambda: keras.optimizers.SGD(0.05),
        loss="mse",
        metrics=make_own,
        weighted_metrics=lambda: [Largest("weighted"), "mse"],
        mesh=mesh,
    )
    arguments = {"shuffle": False, "sample_weight": weight, "validation_data": (x, y)}
    got = ours.fit(x, y, 4, 2, 0, **arguments).history
    same(got, theirs.fit(x, y, 4, 2, 0, **arguments).history)
    names = [name for name in ours.metrics_names if name != "last"]
    for name, metric in zip(ours.metrics_names, ours.metrics, strict=True):
        result = metric.result()
        for key, value in (result if isinstance(result, dict) else {name: result}).items():
            np.testing.assert_allclose(value, got[f"val_{key}"][-1], rtol=1e-6, err_msg=name)
    same(*(m.evaluate(x, y, 4, 0, sample_weight=weight, return_dict=True) for m in (ours, theirs)))
    same(*(m.train_on_batch(x, y, weight, return_dict=True) for m in (ours, theirs)))
    same(*(m.test_on_batch(x, y, return_dict=True) for m in (ours, theirs)))
    assert names[:2] == ["loss", "largest"]
    ours.reset_metrics()
    assert [float(metric.result()) for metric in ours.metrics[:2]] == [0.0, 0.0]


class EvaluatesInside(keras.callbacks.Callback):
    """Evaluates in the middle of an epoch, which must not enter its numbers."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def on_train_batch_end(self, batch, logs=None):
        """Evaluate once, after reading the numbers so far."""
        if batch == 3:
            assert logs["largest"] > 0
            self.model.evaluate(100 * self.x, self.y, 4, 0)


def test_a_pass_inside_a_pass_keeps_to_itself():
    x, y, _ = rows()
    found = []
    for callbacks in ([], [EvaluatesInside(x, y)]):
        model, _ = twins(optimizer="sgd", loss="mse", metrics=lambda: [Largest(), "mae"], mesh={"data": 8})
        found.append(model.fit(x, y, 2, 2, 0, shuffle=False, callbacks=callbacks).history)
    same(*found)


def test_rows_of_steps_that_ran_as_one_program_are_fed_in_order():
    x, y, weight = rows()
    found = []
    for steps in (1, 2):
        model, _ = twins(
            optimizer="sgd", loss="mse", metrics=make_own, steps_per_execution=steps, mesh={"data": 4, "fsdp": 2}
        )
        found.append(model.fit(x, y, 4, 2, 0, shuffle=False, sample_weight=weight).history)
    same(*found)


def test_a_metric_may_keep_what_it_likes():
    x, y, _ = rows()
    model, _ = twins(optimizer="sgd", loss="mse", metrics=lambda: [Median()], mesh={"data": 8})
    predictions = model.predict(x, verbose=0)
    for _ in range(2):
        got = model.evaluate(x, y, 4, 0, return_dict=True)["median"]
        np.testing.assert_allclose(got, np.median(predictions[:, 0]), rtol=1e-6)


@pytest.mark.parametrize(
    "make, adds_up",
    [
        (lambda: keras.metrics.MeanSquaredError(), True),
        (lambda: type("Named", (keras.metrics.AUC,), {})(), True),
        (lambda: keras.metrics.MeanMetricWrapper(lambda y, p: keras.ops.mean(abs(y - p), axis=-1)), True),
        (lambda: keras.metrics.MeanMetricWrapper(keras.losses.MeanSquaredError()), False),
        (lambda: keras.metrics.MeanMetricWrapper(batch_mean), False),
        (lambda: keras.metrics.MeanMetricWrapper(worse_than_average), False),
        (lambda: Doubled(), False),
        (lambda: Largest(), False),
    ],
)
def test_only_what_is_known_to_add_up_is_summed(make, adds_up):
    assert is_additive(make(), Output((), None, (1, 3), np.zeros((1, 3), "float32"))) == adds_up


def test_sums_and_rows_are_kept_apart():
    y, y_pred = REAL
    measured = MetricSet([Largest(), "mae"], None, [Output((), None, y_pred.shape, y[:1])])
    statistics = measured.statistics([y], [y_pred], [None], None)
    assert statistics.keys() == {FED_ROWS, "mae"}
    assert list(statistics[FED_ROWS].predictions) == [0]


TOKENS = RNG.integers(0, 5, (6, 7))
LOGITS = RNG.normal(size=(6, 7, 5)).astype("float32")
TOKEN_WEIGHTS = RNG.integers(0, 2, (6, 7)).astype("float32")


class Lookup(nn.Module):
    """Scores of the next token by the token before."""

    @nn.compact
    def __call__(self, x):
        """Look them up."""
        return nn.Embed(5, 5, name="table")(x)


@pytest.mark.parametrize("batch_size", [1, 4, 6])
@pytest.mark.parametrize("mesh", [{"data": 4, "fsdp": 2}, None], ids=str)
def test_perplexity_of_a_keras_loss_does_not_depend_on_batches(mesh, batch_size):
    model = dew_keras.Model(Lookup(), variables={"params": {"table": {"embedding": LOGITS[0, :5]}}})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    model.compile("sgd", loss, metrics=[dew_keras.Perplexity(name="all")], weighted_metrics=["perplexity"], mesh=mesh)
    x, y = TOKENS, np.roll(TOKENS, 1, axis=1)
    got = model.evaluate(x, y, batch_size, 0, sample_weight=TOKEN_WEIGHTS, return_dict=True)
    chances = jax.nn.log_softmax(LOGITS[0, :5])[x, y]
    want = np.exp(-(chances * TOKEN_WEIGHTS).sum() / TOKEN_WEIGHTS.sum())
    np.testing.assert_allclose(got["perplexity"], want, rtol=1e-6)
    np.testing.assert_allclose(got["all"], np.exp(-chances.mean()), rtol=1e-6)


def test_perplexity_takes_probabilities_and_its_config_makes_it_again():
    metric = dew_keras.Perplexity.from_config(dew_keras.Perplexity(from_logits=False).get_config())
    metric.update_state(TOKENS[..., None], jax.nn.softmax(LOGITS), TOKEN_WEIGHTS[:, 0])
    losses = -np.log(np.take_along_axis(np.asarray(jax.nn.softmax(LOGITS)), TOKENS[..., None], -1)[..., 0])
    want = np.exp((losses * TOKEN_WEIGHTS[:, :1]).sum() / TOKEN_WEIGHTS[:, 0].sum() / 7)
    np.testing.assert_allclose(metric.result(), want, rtol=1e-5)


def test_perplexity_counts_every_token_alike_in_rows_of_any_length():
    metric, losses = dew_keras.Perplexity(), []
    for length in (2, 7):
        metric.update_state(TOKENS[:, :length], LOGITS[:, :length])
        chances = jax.nn.log_softmax(LOGITS[:, :length])
        losses.append(-np.take_along_axis(np.asarray(chances), TOKENS[:, :length, None], -1).ravel())
    np.testing.assert_allclose(metric.result(), np.exp(np.concatenate(losses).mean()), rtol=1e-6)
