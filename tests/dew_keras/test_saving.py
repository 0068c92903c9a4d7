"""Files hold all of a model, change as a whole or not at all, and do nothing but give numbers when they are read."""

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from typing import Any

import flax.linen as nn
import h5py
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import dew_keras
from dew.pretrained import load_pretrained, save_pretrained
from dew_keras.module_config import module_config, module_from_config
from dew_keras.weights_file import DamagedFileError
from tests.dew_keras.nets import Linear, Regularised, rows
from tests.dew_keras.texts import tiny_language_module, tiny_tokenizer
from tests.tiny import tiny_batch

# Keras reads its own variables in a way that NumPy 2 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ROOT = pathlib.Path(__file__).resolve().parents[2]
X, Y, _ = rows(8)
CUSTOM = {"Linear": Linear, "Regularised": Regularised}


def linear(optimizer="adam", seed=0, **arguments):
    model = dew_keras.Model(Linear(), seed=seed)
    model.compile(optimizer, "mse", **arguments)
    return model


def language(seed=0, **fields):
    model = dew_keras.Model(tiny_language_module(**fields), tiny_tokenizer(), seed=seed)
    model.compile(keras.optimizers.Adam(0.01), accumulation=2, mesh={"fsdp": 8})
    return model


TOKENS = tiny_batch(rows=6, length=8)


@pytest.fixture(scope="module")
def trained():
    """A language model with a window of one batch open."""
    model = language()
    model.fit(TOKENS, batch_size=2, verbose=0)
    return model


def weights_equal(first, second):
    for got, want in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)


def goes_on(model):
    return model.fit(TOKENS, batch_size=2, epochs=2, initial_epoch=1, verbose=0).history["loss"], model.get_weights()


@pytest.fixture(scope="module")
def uninterrupted():
    model = language()
    losses = model.fit(TOKENS, batch_size=2, epochs=2, verbose=0).history["loss"]
    return losses[1:], model.get_weights()


def test_a_run_goes_on_in_other_storage_on_another_mesh(tmp_path, trained, uninterrupted):
    trained.save_weights(tmp_path / "a.weights.h5")
    with h5py.File(tmp_path / "a.weights.h5") as file:
        assert "variables/params/layers_1/mlp/up_proj/kernel" in file
        assert "optimizer/slots/momentum/layers_1/mlp/up_proj/kernel" in file
        assert "window/gradients/layers_1/mlp/up_proj/kernel" in file
    apart = language(seed=9, scan_layers=False)
    apart.compile(apart.optimizer, accumulation=2, mesh={"data": 4, "tensor": 2})
    apart.load_weights(tmp_path / "a.weights.h5")
    losses, weights = goes_on(apart)
    np.testing.assert_allclose(losses, uninterrupted[0], rtol=1e-5)
    for got, want in zip(weights, uninterrupted[1], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_model_file_holds_the_module_the_tokenizer_and_the_run(tmp_path, trained, uninterrupted):
    path = tmp_path / "m.keras"
    trained.save(path)
    model = dew_keras.load_model(path)
    assert (model.module, dict(model.mesh.shape)) == (trained.module, dict(trained.mesh.shape))
    assert int(model.optimizer.iterations) == int(trained.optimizer.iterations) == 1
    assert model.tokenizer.encode("hello there") == trained.tokenizer.encode("hello there")
    weights_equal(model, trained)
    losses, weights = goes_on(model)
    assert losses == uninterrupted[0]
    for got, want in zip(weights, uninterrupted[1], strict=True):
        np.testing.assert_array_equal(got, want)
    other = language(seed=4)
    other.load_weights(path)
    weights_equal(other, trained)


def test_a_loaded_model_is_saved_as_it_was_loaded(tmp_path, trained):
    trained.save(tmp_path / "a.keras")
    dew_keras.load_model(tmp_path / "a.keras").save(tmp_path / "b.keras")
    with zipfile.ZipFile(tmp_path / "a.keras") as a, zipfile.ZipFile(tmp_path / "b.keras") as b:
        for name, file in (("a", a), ("b", b)):
            (tmp_path / f"{name}.weights.h5").write_bytes(file.read("model.weights.h5"))
        assert json.loads(a.read("config.json")) == json.loads(b.read("config.json"))
    with h5py.File(tmp_path / "a.weights.h5") as a, h5py.File(tmp_path / "b.weights.h5") as b:
        names = []
        a.visititems(lambda name, node: names.append(name) if isinstance(node, h5py.Dataset) else None)
        assert len(names) > 40
        for name in names:
            np.testing.assert_array_equal(a[name][()], b[name][()])


def test_bfloat16_is_kept_to_the_bit(tmp_path):
    values = np.arange(-50, 78, dtype=np.float32).reshape(4, 32) * 0.3
    values = values.astype(jnp.bfloat16)
    variables = {"params": {"dense": {"kernel": values, "bias": np.full(32, 1 / 3, jnp.bfloat16)}}}
    model = dew_keras.Model(Linear(32), variables=variables)
    model.save_weights(tmp_path / "a.weights.h5")
    with h5py.File(tmp_path / "a.weights.h5") as file:
        assert file["variables/params/dense/kernel"].dtype == np.uint16
    other = dew_keras.Model(Linear(32))
    other.load_weights(tmp_path / "a.weights.h5")
    for got, want in zip(other.get_weights(), model.get_weights(), strict=True):
        assert got.dtype == want.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


def test_weights_are_read_before_anything_shows_the_shapes(tmp_path):
    model = linear()
    model.fit(X, Y, 4, verbose=0)
    model.save_weights(tmp_path / "a.weights.h5")
    fresh = dew_keras.Model(Linear(), seed=5)
    fresh.load_weights(tmp_path / "a.weights.h5")
    weights_equal(fresh, model)
    np.testing.assert_allclose(fresh.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-6)
    with pytest.raises(ValueError, match="no weights yet"):
        dew_keras.Model(Linear()).load_weights(tmp_path / "a.weights.h5", skip_mismatch=True)


def test_a_mismatch_is_skipped_with_its_optimizer_state(tmp_path):
    model = linear()
    model.fit(X, Y, 4, verbose=0)
    model.save_weights(tmp_path / "a.weights.h5")
    wide = dew_keras.Model(Linear(5))
    wide.compile("adam", "mse")
    wide.build(X)
    before = wide.get_weights()
    with pytest.raises(ValueError, match=r"'params/dense/bias' with shape \(3,\); the module has \(5,\)"):
        wide.load_weights(tmp_path / "a.weights.h5")
    wide.load_weights(tmp_path / "a.weights.h5", skip_mismatch=True)
    for got, want in zip(wide.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)
    wide.fit(X, np.ones((8, 5), "float32"), 8, verbose=0)
    assert int(wide.optimizer.iterations) == 3  # two of the file, one here


def test_the_state_of_another_optimizer_is_left_out_with_a_warning(tmp_path):
    model = linear(keras.optimizers.Adam(0.25))
    model.fit(X, Y, 4, verbose=0)
    model.save_weights(tmp_path / "a.weights.h5")
    other = linear(keras.optimizers.SGD(0.5))
    with pytest.warns(UserWarning, match="state of another optimizer.*Only the weights were loaded"):
        other.load_weights(tmp_path / "a.weights.h5")
    weights_equal(other, model)
    other.fit(X, Y, 8, verbose=0)
    assert (int(other.optimizer.iterations), float(other.optimizer.learning_rate)) == (1, 0.5)


def test_weights_without_a_run_leave_the_optimizer_as_it_is(tmp_path):
    model = linear()
    model.build(X)
    model.save_weights(tmp_path / "a.weights.h5")
    other = linear()
    other.fit(X, Y, 4, verbose=0)
    other.load_weights(tmp_path / "a.weights.h5")
    weights_equal(other, model)
    other.fit(X, Y, 8, verbose=0)
    assert int(other.optimizer.iterations) == 3


# Paths and names ---------------------------------------------------------------------------------


def test_what_save_writes_follows_from_the_path(tmp_path, trained):
    for path, arguments, match in (
        ("m.h5", {}, "Received: filepath='.*m.h5'"),
        ("m.pt", {}, "a path without an extension"),
        ("m.keras", {"zipped": False}, "leave zipped out"),
        ("folder", {"zipped": True}, "leave zipped out"),
    ):
        with pytest.raises(ValueError, match=match):
            trained.save(tmp_path / path, **arguments)
    trained.save(tmp_path / "model-0.5B")
    assert (tmp_path / "model-0.5B" / "config.json").is_file()
    weights_equal(dew_keras.load_model(tmp_path / "model-0.5B"), trained)
    trained.save(tmp_path / "m.keras", zipped=True)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        trained.save(tmp_path / "m.keras", overwrite=False)
    with pytest.raises(ValueError, match="no Hugging Face checkpoint format"):
        linear().save(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"reads a `\.keras` file"):
        dew_keras.load_model(tmp_path / "m.weights.h5")
    with pytest.raises(FileNotFoundError, match="no file"):
        dew_keras.load_model(tmp_path / "n.keras")


# Files from others -------------------------------------------------------------------------------


def test_files_of_keras_are_refused_by_name(tmp_path):
    theirs = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    theirs.save_weights(tmp_path / "a.weights.h5")
    theirs.save(tmp_path / "a.keras")
    ours = linear()
    ours.build(X)
    for path, match in (("a.weights.h5", "written by Keras for Keras layers"), ("a.keras", "Keras")):
        with pytest.raises(ValueError, match=match):
            ours.load_weights(tmp_path / path)
    with pytest.raises(ValueError, match=r"keras\.saving\.load_model"):
        dew_keras.load_model(tmp_path / "a.keras")


def _replace(path, changes):
    with zipfile.ZipFile(path) as file:
        entries = {name: file.read(name) for name in file.namelist()} | changes
    with zipfile.ZipFile(path, "w") as file:
        for name, content in entries.items():
            file.writestr(name, content)


def _deflate(path):
    with zipfile.ZipFile(path) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            file.writestr(name, content)


def _edit(path, **changes):
    with zipfile.ZipFile(path) as file:
        config = json.loads(file.read("config.json"))
    _replace(path, {"config.json": json.dumps(config | changes)})


ATTACKS = {
    "a path out of the file": (lambda path: _replace(path, {"../evil.py": "x"}), "nothing unknown"),
    "a compressed entry": (_deflate, "compressed or encrypted"),
    "no zip": (lambda path: path.write_bytes(path.read_bytes()[:1000]), "damaged"),
    "no JSON": (lambda path: _replace(path, {"config.json": "{"}), "no JSON"),
    "deep JSON": (lambda path: _replace(path, {"config.json": "[" * 100000}), "no JSON"),
    "a class of another library": (
        lambda path: _edit(path, module={"object": "subprocess.Popen", "fields": {"args": "true"}}),
        "needs the class 'subprocess.Popen'",
    ),
    "something else in a module of dew": (
        lambda path: _edit(path, module={"object": "dew.pretrained.export.shutil", "fields": {}}),
        "no module class",
    ),
    "a function by name": (
        lambda path: _edit(path, module={"partial": [{"function": "os.system"}, ["true"], {}]}),
        "needs the function 'os.system'",
    ),
    "a model class": (lambda path: _edit(path, model="evil.Model"), "a model of the class 'evil.Model'"),
    "an unknown form": (lambda path: _edit(path, module={"pickle": "gASV"}), "a form that is not known"),
    "no module": (lambda path: _edit(path, module={"object": "flax.linen.Dense"}), "form that is not known"),
    "another field": (
        lambda path: _edit(path, module={"object": "flax.linen.Dense", "fields": {"x": 1}}),
        "cannot be built",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_model_file_builds_nothing_that_it_may_not(tmp_path, attack, saved):
    path = tmp_path / "m.keras"
    shutil.copy(saved / "m.keras", path)
    change, match = ATTACKS[attack]
    change(path)
    with pytest.raises(ValueError, match=match):
        dew_keras.load_model(path, CUSTOM)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = linear()
    model.fit(X, Y, 4, verbose=0)
    model.save(folder / "m.keras")
    model.save_weights(folder / "m.weights.h5")
    return folder


def _bomb(file):
    del file["variables/params/dense/bias"]
    file.create_dataset("variables/params/dense/bias", (3,), "f4", chunks=(1,), compression="gzip")


def _unwritten(file):
    del file["optimizer/count"]
    file.create_dataset("optimizer/count", (2**40,), "f4")


def _outside(file):
    del file["variables/params/dense/bias"]
    file["variables/params/dense/bias"] = h5py.ExternalLink("/etc/passwd", "x")


def _set_facts(text):
    return lambda file: file.attrs.__setitem__("facts", text)


DAMAGE = {
    "compressed": (_bomb, "no plain array"),
    "bytes that are not there": (_unwritten, "no plain array"),
    "a link out of the file": (_outside, "lacks the variable 'params/dense/bias'"),
    "no counter": (lambda file: file.pop("training/step"), "counter 'step'"),
    "facts": (_set_facts("[]"), "its facts"),
    "no accumulation": (_set_facts("{}"), "accumulation or seed is missing"),
    "a negative batch": (
        _set_facts('{"accumulation": 1, "seed": 0, "cursor": {"epoch": 0, "batch": -1, "first": 0, "order": {}}}'),
        "where its fit was",
    ),
    "a sum of nothing": (
        lambda file: (
            file.create_dataset("sums/x", data=1.0),
            _set_facts('{"accumulation": 1, "seed": 0, "cursor": {"epoch": 0, "batch": 1, "first": 0, "order": {}}}')(
                file
            ),
        ),
        "no sum of a log",
    ),
    "another version": (lambda file: file.attrs.__setitem__("format", "dew_keras.weights.1"), "this version reads"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_weights_file_changes_nothing(tmp_path, damage, saved):
    path = tmp_path / "m.weights.h5"
    shutil.copy(saved / "m.weights.h5", path)
    change, match = DAMAGE[damage]
    with h5py.File(path, "r+") as file:
        change(file)
    model = linear(seed=3)
    model.build(X)
    before = model.get_weights()
    with pytest.raises(ValueError, match=match):
        model.load_weights(path)
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_class_of_ones_own_is_given_or_imported_when_told(saved):
    with pytest.raises(ValueError, match=r"custom_objects=\{'Linear': Linear\}"):
        dew_keras.load_model(saved / "m.keras", compile=False)
    for arguments in ({"custom_objects": CUSTOM}, {"safe_mode": False}):
        model = dew_keras.load_model(saved / "m.keras", compile=False, **arguments)
        assert type(model.module).__name__ == "Linear"
    with keras.saving.custom_object_scope(CUSTOM):
        assert dew_keras.load_model(saved / "m.keras", compile=False).built


class Everything(nn.Module):
    """Fields of every kind that a description can hold."""

    size: int = 3
    dtype: Any = jnp.float32
    activation: Any = nn.relu
    kernel_init: Any = nn.initializers.lecun_normal()
    parts: tuple = ()
    options: Any = None
    norm: Any = nn.LayerNorm

    @nn.compact
    def __call__(self, x):
        """Apply it."""
        return self.activation(nn.Dense(self.size, kernel_init=self.kernel_init)(x))


def test_modules_are_data_and_back():
    module = Everything(
        size=np.int64(4),
        dtype=jnp.bfloat16,
        activation=nn.gelu,
        kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "uniform"),
        parts=(nn.Dense(2, precision=jax.lax.Precision.HIGHEST), nn.Sequential([nn.Dense(1), nn.tanh])),
        options={"rate": 0.5, "names": ["a", None]},
    )
    config = json.loads(json.dumps(module_config(module)))
    again = module_from_config(config, {"Everything": Everything}, safe_mode=True)
    assert (again.size, again.activation, again.parts[0]) == (4, nn.gelu, module.parts[0])
    assert (jnp.dtype(again.dtype), again.options) == (jnp.bfloat16, module.options)
    assert again.norm is nn.LayerNorm
    key = jax.random.key(0)
    np.testing.assert_array_equal(again.kernel_init(key, (3, 5)), module.kernel_init(key, (3, 5)))
    assert module_config(again) == config
    with pytest.raises(ValueError, match=r"Everything.activation cannot be saved: '.*<lambda>' has no name"):
        module_config(Everything(activation=lambda x: x))
    with pytest.raises(ValueError, match=r"Everything.options\['x'\] cannot be saved: a value of type object"):
        module_config(Everything(options={"x": object()}))


# Interrupted saves -------------------------------------------------------------------------------


def _fail(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def _fail_late(monkeypatch, owner, name, calls):
    original, count = getattr(owner, name), [0]

    def sometimes(*args, **kwargs):
        count[0] += 1
        return _fail() if count[0] > calls else original(*args, **kwargs)

    monkeypatch.setattr(owner, name, sometimes)


@pytest.mark.parametrize("name", ["m.weights.h5", "m.keras", "directory"])
def test_a_failed_save_leaves_the_old_file_and_no_debris(tmp_path, monkeypatch, trained, name):
    path = tmp_path / name
    save = trained.save_weights if name.endswith(".h5") else trained.save
    save(path)
    files = [path] if path.is_file() else sorted(path.iterdir())
    before = [file.read_bytes() for file in files]
    if name == "directory":
        _fail_late(monkeypatch, os, "fsync", 1)
    else:
        _fail_late(monkeypatch, h5py.Group, "create_dataset", 5)
    with pytest.raises(OSError, match=rf"{name}.*No space left.*unchanged.*bytes free") as caught:
        save(path)
    assert caught.value.errno == errno.ENOSPC
    assert [file.read_bytes() for file in files] == before
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 0, 10**5))
    with pytest.raises(OSError, match=r"no room.*it has 100,000"):
        save(path)
    assert [file.read_bytes() for file in files] == before
    assert list(tmp_path.iterdir()) == [path]


LIMITED = """
import resource, sys, pathlib, numpy as np
import dew_keras
from tests.dew_keras.nets import Linear
folder = pathlib.Path(sys.argv[1])
variables = {"params": {"dense": {"kernel": np.ones((256, 512), "f4"), "bias": np.ones(512, "f4")}}}
model = dew_keras.Model(Linear(512), variables=variables)
for name in ("a.weights.h5", "a.keras"):
    save = model.save_weights if name.endswith(".h5") else model.save
    save(folder / name)
    before = (folder / name).read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    try:
        save(folder / name)
    except OSError as error:
        assert "could not be written" in str(error), error
    else:
        raise AssertionError("the limit had no effect")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert (folder / name).read_bytes() == before
print("LEFT", sorted(path.name for path in folder.iterdir()))
"""


def test_a_file_that_the_system_cuts_short_is_not_kept(tmp_path):
    environment = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "LEFT ['a.keras', 'a.weights.h5']" in done.stdout


def test_a_damaged_file_is_an_error_of_both_kinds(tmp_path):
    (tmp_path / "a.weights.h5").write_bytes(b"nothing")
    model = linear()
    model.build(X)
    with pytest.raises(DamagedFileError, match="damaged") as caught:
        model.load_weights(tmp_path / "a.weights.h5")
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, ValueError)


def test_masters_in_a_file_are_exact_where_the_model_keeps_fewer_bits(tmp_path):
    def compiled(made):
        made.compile(keras.optimizers.Adam(1e-4), mesh={"fsdp": 8})
        return made

    def model():
        return compiled(dew_keras.Model.from_preset(tmp_path / "half"))

    given = load_pretrained("tests/fixtures/llama")
    save_pretrained(tmp_path / "half", given.module, given.variables, given.config, dtype="bfloat16")

    batch = tiny_batch(rows=8, length=8)
    whole, early = model(), model()
    whole.fit(batch, batch_size=8, verbose=0)
    whole.save_weights(tmp_path / "a.weights.h5")
    early.load_weights(tmp_path / "a.weights.h5")
    assert {leaf.dtype for leaf in jax.tree.leaves(early.variables)} == {jnp.dtype(jnp.bfloat16)}
    early.save(tmp_path / "b.keras")
    last = compiled(dew_keras.load_model(tmp_path / "b.keras", compile=False))
    want = whole.fit(batch, batch_size=8, epochs=2, initial_epoch=1, verbose=0).history
    for other in (early, last):
        assert other.fit(batch, batch_size=8, epochs=2, initial_epoch=1, verbose=0).history == want
        weights_equal(other, whole)
    last.save(tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "llama"


def test_a_model_loads_compiled_where_its_mesh_does_not_fit(tmp_path):
    model = linear()
    model.fit(X, Y, 4, verbose=0)
    model.save(tmp_path / "m.keras")
    with zipfile.ZipFile(tmp_path / "m.keras") as file:
        compiled = json.loads(file.read("config.json"))["compile"]
    _edit(tmp_path / "m.keras", compile=compiled | {"mesh": {"fsdp": 16, "tensor": 2}})
    with pytest.warns(UserWarning, match=r"mesh=\{'fsdp': 16, 'tensor': 2\}, which is not possible here.*on data"):
        again = dew_keras.load_model(tmp_path / "m.keras", CUSTOM)
    assert dict(again.mesh.shape)["data"] == 8
    assert int(again.optimizer.iterations) == int(model.optimizer.iterations) > 0
    got, want = (m.fit(X, Y, 4, verbose=0).history["loss"] for m in (again, model))
    np.testing.assert_allclose(got, want, rtol=1e-5)


JUNK = (None, 7, "word", [], {}, {"a": 1}, [[1]])
COMPILE_KEYS = ("optimizer", "loss", "metrics", "mesh", "layout", "sampler", "accumulation", "dtype", "no_such_option")


def _refusal(path):
    try:
        dew_keras.load_model(path, CUSTOM)
    except ValueError as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore:.*was compiled with mesh")
@pytest.mark.parametrize("key", ["module", "name", "seed", "end_of_turn", "pretrained", "model", "compile"])
def test_a_damaged_description_is_a_named_error_or_loads(tmp_path, saved, key):
    with zipfile.ZipFile(saved / "m.keras") as file:
        config = json.loads(file.read("config.json"))
    path = tmp_path / "m.keras"
    changes = [{key: junk} for junk in JUNK]
    if key == "compile":
        changes += [{key: config[key] | {name: junk}} for name in COMPILE_KEYS for junk in JUNK]
    for change in changes:
        shutil.copy(saved / "m.keras", path)
        _edit(path, **change)
        error = _refusal(path)
        assert error is None or "m.keras" in str(error), change
    shutil.copy(saved / "m.keras", path)
    _replace(path, {"config.json": json.dumps({name: value for name, value in config.items() if name != key})})
    with pytest.raises(DamagedFileError, match=rf"m\.keras is damaged.*{key}='nothing'"):
        dew_keras.load_model(path, CUSTOM)


def test_sharded_weights_files_are_refused_by_name(tmp_path):
    model = linear()
    model.build(X)
    for verb in (lambda: model.save_weights(tmp_path / "a.weights.json"), lambda: model.load_weights("a.weights.json")):
        with pytest.raises(ValueError, match=r"Weights in several files.*Use a path that ends in `\.weights\.h5`"):
            verb()
    with pytest.raises(ValueError, match="max_shard_size is not available: one file of any size"):
        model.save_weights(tmp_path / "a.weights.h5", max_shard_size=1)
    assert list(tmp_path.iterdir()) == []
