"""Pickled weights are read as tensors without torch, and a pickle that asks for anything else is refused unrun."""

import collections
import io
import os
import pickle
import struct
import zipfile

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.pretrained import CheckpointError, load_pretrained, unpickle
from dew.pretrained.source import whole
from dew.pretrained.torch_pickle import TorchFile
from tests.pretrained.checkpoints import FIXTURES, everything_in

PICKLED = FIXTURES / "pickled"


@pytest.mark.parametrize("name", ["whole", "sharded"])
def test_pickled_weights_are_those_of_the_safetensors(name):
    want = load_pretrained(PICKLED / "same", dtype="float32")
    got = load_pretrained(PICKLED / name, dtype="float32", allow_pickle=True, mesh={"fsdp": 2})
    jax.tree.map(np.testing.assert_array_equal, got.variables, want.variables)


@pytest.mark.parametrize("name", ["whole", "sharded"])
def test_pickles_are_read_only_when_allowed(name):
    with pytest.raises(
        CheckpointError, match=r"holds the pickled pytorch_model.*\.bin: convert .* or pass allow_pickle"
    ):
        load_pretrained(PICKLED / name)


def test_views_shared_storages_and_parameters():
    source = TorchFile(PICKLED / "odd.bin")
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    want = {
        "base": base,
        "transposed": base.T,
        "part": base[1:3, ::2],
        "expanded": np.array([[1, 2]] * 3, np.float32),
        "scalar": np.array(7),
        "empty": np.zeros((0, 3), np.float16),
        "flags": np.array([True, False]),
        "parameter": np.ones(2),
    }
    assert set(source.names()) == {*want, "linear.weight", "linear.bias"}
    for name, values in want.items():
        assert source.info(name) == (values.shape, values.dtype)
        np.testing.assert_array_equal(source.read(name, whole(values.shape)), values)
    np.testing.assert_array_equal(source.read("transposed", (slice(1, 4), slice(2, 3))), base.T[1:4, 2:3])
    source.release("base")
    np.testing.assert_array_equal(source.read("base", whole((4, 6))), base)
    assert set(TorchFile(PICKLED / "module.bin").names()) == {"weight", "bias"}


def archive(path, data, records=None, **options):
    """A file as torch writes it, around this pickle."""
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("archive/data.pkl", data)
        for name, content in (records or {}).items():
            file.writestr(f"archive/{name}", content)
    return path


class Asks:
    """Pickles to a call of anything."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


HOSTILE = {
    "os.system": (Asks(os.system, "touch owned"), "names 'posix.system'"),
    "eval": (Asks(eval, "open('owned', 'w')"), "names 'builtins.eval'|names '__builtin__.eval'"),
    "getattr": (Asks(getattr, collections.OrderedDict, "mro"), "names '.*getattr'"),
    "a class": (io.BytesIO, "names '_?io.BytesIO'"),
    "a set": ({1, 2}, "names '.*set'|uses"),
    "bytes": ({"a": b"x" * 300}, "names '_codecs.encode'"),
    "an ordered dict of lists": (Asks(collections.OrderedDict, [("a", 1)]), "as torch does not call it"),
    "no tensors": ({"a": 1}, "hold tensors by name and nothing else. Received: 'a' of type int"),
    "an optimizer": ({"state": {"step": 3}}, "Received: 'state' of type dict"),
    "a list": ([1, 2], "must hold a dict of tensors. Received: list"),
    "nothing": ({}, "must hold a dict of tensors. Received: dict"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_else_a_pickle_names_is_refused_and_not_run(name, tmp_path, monkeypatch):
    value, message = HOSTILE[name]
    monkeypatch.chdir(tmp_path)
    path = archive(tmp_path / "a.bin", pickle.dumps(value, protocol=2))
    before = everything_in(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        TorchFile(path)
    assert everything_in(tmp_path) == before


def stored(shape=(2,), strides=(1,), offset=0, storage="FloatStorage", key="0", call=None):
    """A pickle of one tensor, opcode by opcode."""

    def number(value):
        return (
            b"J" + struct.pack("<i", value) if -(2**31) <= value < 2**31 else b"\x8a\x09" + struct.pack("<Qb", value, 0)
        )

    def text(value):
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    held = b"(" + text("storage") + f"ctorch\n{storage}\n".encode() + text(key) + text("cpu") + number(2) + b"tQ"
    sizes = b"(" + b"".join(map(number, shape)) + b"t"
    steps = b"(" + b"".join(map(number, strides)) + b"t"
    rebuilt = call or b"ctorch._utils\n_rebuild_tensor_v2\n"
    tensor = rebuilt + b"(" + held + number(offset) + sizes + steps + b"\x89ccollections\nOrderedDict\n)RtR"
    return b"\x80\x02}" + text("a") + tensor + b"s."


SIZES = b"(J\2\0\0\0t"
DOUBLED = b")q\0" + b"h\0\x86q\0" * 99 + b"\x85"
"""A tuple of tuples that is 2**99 of them as a text."""
GOOD = {"data/0": bytes(8), "version": b"3\n"}
BROKEN = {
    "past the end": (stored((3,)), GOOD, "ends at byte 12 of a storage of 8 bytes"),
    "an offset past the end": (stored(offset=1), GOOD, "ends at byte 12"),
    "wide strides": (stored((2,), (2**40,)), GOOD, "ends at byte 4398046511108"),
    "a negative offset": (stored(offset=-1), GOOD, "a tensor has offset -1"),
    "negative strides": (stored(strides=(-1,)), GOOD, r"strides \(-1,\)"),
    "an absurd shape": (stored((2**60, 2**60), (0, 0)), GOOD, "a tensor has offset 0"),
    "sizes without strides": (stored((2, 2), (1,)), GOOD, "2 sizes and 1 strides"),
    "no storage": (stored(key="9"), GOOD, "storage '9', which is not there"),
    "a path for a key": (stored(key="../version"), GOOD, r"storage '\.\./version', which is not there"),
    "complex numbers": (stored(storage="ComplexFloatStorage"), GOOD, "is in a ComplexFloatStorage; known"),
    "a quantised tensor": (
        stored(call=b"ctorch._utils\n_rebuild_qtensor\n"),
        GOOD,
        r"names 'torch\._utils\._rebuild_qt",
    ),
    "big endian": (stored(), {**GOOD, "byteorder": b"big"}, "not stored in little-endian order"),
    "a cut pickle": (stored()[:-40], GOOD, "in the middle"),
    "an empty stack": (b"\x80\x02R.", GOOD, "its pickle is damaged"),
    "an unknown memo": (b"\x80\x02h\x07.", GOOD, "its pickle is damaged"),
    "a huge memo": (b"\x80\x02}r\xff\xff\xff\xff.", GOOD, "must hold a dict of tensors"),
    "a key twice": (stored()[:-1] + stored()[3:], GOOD, "the key 'a' appears twice"),
    "a huge text": (b"\x80\x02X\xff\xff\xff\xff.", GOOD, "in the middle"),
    "text of an extension": (b"\x80\x02\x82\x01.", GOOD, "uses EXT1"),
    "sizes of sizes": (stored().replace(SIZES, DOUBLED), GOOD, "offset, sizes and strides of a tensor are no whole"),
    "a text of sizes": (stored().replace(SIZES, b"X\2\0\0\0ab"), GOOD, "sizes and strides of a tensor are no tuples"),
    "a name of tuples": (b"\x80\x04" + DOUBLED + b"\x8c\1x\x93.", GOOD, "its pickle is damaged"),
    "a long name": (stored(storage=f"{'x' * 99}Storage"), GOOD, r"names 'torch\.x+Storage'"),
    "an old protocol": (b"\x80\x00}.", GOOD, "protocol 0 is not read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_by_its_rule(name, tmp_path):
    data, records, message = BROKEN[name]
    with pytest.raises(CheckpointError, match=message):
        TorchFile(archive(tmp_path / "a.bin", data, records))


def test_more_opcodes_than_any_dict_of_tensors_has_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(unpickle, "_MAX_STEPS", 1000)
    for opcode in (b"}", b"]", b"N", b"h\0"):
        with pytest.raises(CheckpointError, match="its pickle has more than 1000 opcodes"):
            TorchFile(archive(tmp_path / "a.bin", b"\x80\x02}q\0" + opcode * 1000 + b"."))


def test_the_tensor_of_these_tests_is_read_when_it_is_right(tmp_path):
    source = TorchFile(archive(tmp_path / "a.bin", stored(), {"data/0": struct.pack("<2f", 1, 2)}))
    assert source.read("a", (slice(0, 2),)).tolist() == [1, 2]


def test_other_files_are_refused(tmp_path):
    legacy = tmp_path / "legacy.bin"
    legacy.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + pickle.dumps({}, protocol=2))
    with pytest.raises(CheckpointError, match=r"is not a zip archive as torch has written since 1\.6"):
        TorchFile(legacy)
    with pytest.raises(CheckpointError, match="is compressed or appears twice"):
        TorchFile(archive(tmp_path / "zipped.bin", stored() * 9, GOOD, compression=zipfile.ZIP_DEFLATED))
    empty = tmp_path / "empty.bin"
    with zipfile.ZipFile(empty, "w") as file:
        file.writestr("other/file", b"x")
    with pytest.raises(CheckpointError, match=r"holds no data\.pkl"):
        TorchFile(empty)
    with pytest.raises(CheckpointError, match="cannot be read"):
        TorchFile(tmp_path / "absent.bin")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_damage_is_an_error_of_ours_or_harmless(tmp_path_factory, data):
    raw = bytearray((PICKLED / "odd.bin").read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    change = data.draw(st.binary(min_size=0, max_size=9))
    bad = tmp_path_factory.getbasetemp() / "bad.bin"
    bad.write_bytes(raw[:place] + change + raw[place + data.draw(st.integers(0, 9)) :])
    try:
        source = TorchFile(bad)
    except CheckpointError:
        return
    for name in source.names():
        shape, _ = source.info(name)
        source.read(name, tuple(slice(0, min(size, 3)) for size in shape)).sum()
