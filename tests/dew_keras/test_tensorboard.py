"""`dew_keras.TensorBoard` writes what an independent reader of event files finds, under Keras' tags."""

import math
import struct

import keras
import numpy as np
import pytest

import dew_keras
from dew_keras.event_files import EventFile, masked_crc
from tests.dew_keras.nets import rows, twins

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def crc32c(data):
    """CRC-32C bit by bit, from its polynomial; no table."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
    return crc ^ 0xFFFFFFFF


def unmasked(value):
    rotated = (value - 0xA282EAD8) % 2**32
    return (rotated >> 17 | rotated << 15) % 2**32


def records(data):
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        (first,) = struct.unpack_from("<I", data, at + 8)
        contents = data[at + 12 : at + 12 + length]
        (second,) = struct.unpack_from("<I", data, at + 12 + length)
        assert unmasked(first) == crc32c(data[at : at + 8])
        assert unmasked(second) == crc32c(contents)
        yield contents
        at += 16 + length


def fields(message):
    """List (number, value) of a protocol buffer's fields."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    found = []
    while at < len(message):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            found.append((number, varint()))
            continue
        size = {1: 8, 5: 4}.get(wire)
        size = varint() if size is None else size
        found.append((number, message[at : at + size]))
        at += size
    return found


def scalars(folder):
    """Read (tag, step, value) of every file in a folder."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        first, *rest = records(path.read_bytes())
        assert dict(fields(first))[3] == b"brain.Event:2"
        for event in rest:
            event = dict(fields(event))
            value = dict(fields(dict(fields(event[5]))[1]))
            plugin = dict(fields(dict(fields(value[9]))[1]))
            assert plugin[1] == b"scalars"
            tensor = dict(fields(value[8]))
            assert tensor[1] == 1
            found.append((value[1].decode(), event[2], struct.unpack("<f", tensor[5])[0]))
    return found


def test_the_checksum_is_the_published_one():
    # RFC 3720, appendix B.4: 32 bytes of zeros, and of ones.
    assert crc32c(bytes(32)) == 0x8A9136AA
    for data in (b"", bytes(32), b"\xff" * 32, b"123456789"):
        assert unmasked(masked_crc(data)) == crc32c(data)


def test_numbers_are_read_back(tmp_path):
    file = EventFile(tmp_path)
    assert not list(tmp_path.iterdir())
    file.add(0, {"a": 1.5, "b/ö": -2.25})
    file.add(2**40, {"a": math.inf})
    assert scalars(tmp_path) == [("a", 0, 1.5), ("b/ö", 0, -2.25), ("a", 2**40, math.inf)]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("update_freq", ["epoch", "batch", 2])
def test_fit_writes_the_logs_under_the_tags_of_keras(tmp_path, update_freq):
    x, y, _ = rows(12)
    model, _ = twins(optimizer=lambda: keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    board = dew_keras.TensorBoard(tmp_path, update_freq=update_freq)
    seen = []
    spy = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
    history = model.fit(x, y, 4, 2, 0, [board, spy], validation_data=(x, y)).history
    train, validation = scalars(tmp_path / "train"), scalars(tmp_path / "validation")
    want = [(f"epoch_{n}", e, history[n][e]) for e in range(2) for n in ("loss", "mae")]
    want += [("epoch_learning_rate", epoch, 0.1) for epoch in range(2)]
    every = {"epoch": 100, "batch": 1, 2: 2}[update_freq]
    want += [(f"batch_{n}", s, seen[s - 1][n]) for s in range(every, 7, every) for n in ("loss", "mae")]
    held_out = [(f"epoch_{n}", e, history[f"val_{n}"][e]) for e in range(2) for n in ("loss", "mae")]
    held_out += [
        (f"evaluation_{n}_vs_iterations", 3 * (e + 1), history[f"val_{n}"][e])
        for e in range(2)
        for n in ("loss", "mae")
    ]
    for got, expected in ((train, want), (validation, held_out)):
        assert sorted(item[:2] for item in got) == sorted(item[:2] for item in expected)
        values = {item[:2]: item[2] for item in got}
        for tag, step, value in expected:
            np.testing.assert_allclose(values[tag, step], value, rtol=1e-6)


def test_a_frequency_that_means_nothing_is_refused():
    with pytest.raises(ValueError, match="update_freq must be"):
        dew_keras.TensorBoard(update_freq="step")


def test_the_callback_that_needs_tensorflow_says_what_to_use(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model, _ = twins(optimizer="sgd", loss="mse")
    with pytest.raises(ImportError, match=r"Use dew_keras\.TensorBoard\(log_dir='here'\)"):
        model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0, callbacks=[keras.callbacks.TensorBoard("here")])
