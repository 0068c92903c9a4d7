"""The safetensors reader reads what the format's own library reads, and refuses a file that breaks its rules."""

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dew.pretrained.safetensors import SafetensorsFile, open_safetensors
from dew.pretrained.source import CheckpointError, whole
from tests.pretrained.checkpoints import everything_in, safetensors_bytes


def entry(begin=0, end=8, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int64, np.uint8, np.bool_]
)
def test_values_and_slices_are_those_written(tmp_path, dtype):
    values = {
        "a": np.arange(60).reshape(3, 4, 5).astype(dtype),
        "odd": np.arange(3).astype(dtype),
        "empty": np.zeros((0, 4), dtype),
        "scalar": np.array(1).astype(dtype),
    }
    save_file(values, tmp_path / "model.safetensors")
    source = open_safetensors(tmp_path)
    assert set(source.names()) == set(values)
    for name, want in values.items():
        assert source.info(name) == (want.shape, want.dtype)
        np.testing.assert_array_equal(source.read(name, whole(want.shape)), want)
    np.testing.assert_array_equal(source.read("a", (slice(1, 3), slice(0, 2), slice(2, 5))), values["a"][1:3, :2, 2:5])
    source.release("a")
    np.testing.assert_array_equal(source.read("a", whole((3, 4, 5))), values["a"])
    assert source.nbytes == sum(value.nbytes for value in values.values())


BROKEN = {
    "no header": (b"\x01\x02", "has 2 bytes"),
    "an empty file": (b"", "has 0 bytes"),
    "a huge header": (struct.pack("<Q", 2**62) + b"{}", "the header claims 4611686018427387904 bytes"),
    "a truncated header": (safetensors_bytes({"a": entry()})[:20], "the header claims"),
    "not json": (safetensors_bytes(b"{nonsense"), "not valid JSON"),
    "not text": (safetensors_bytes(b"\xff\xfe\xff\xfe"), "not valid JSON"),
    "deeply nested": (safetensors_bytes(b'{"a":' * 100_000), "not valid JSON"),
    "millions of values": (safetensors_bytes(b'{"a":[' + b"1," * 2_000_001), "holds about 2000003 values"),
    "a list": (safetensors_bytes(b"[1, 2]"), "expected a JSON object"),
    "a name twice": (
        safetensors_bytes(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
        "the key 'a' appears twice",
    ),
    "an unknown dtype": (safetensors_bytes({"a": entry(dtype="F99")}, bytes(8)), "dtype 'F99'; known: F64"),
    "a dtype that is no string": (safetensors_bytes({"a": entry(dtype=3)}, bytes(8)), "has dtype 3"),
    "a negative size": (safetensors_bytes({"a": entry(shape=[-2])}, bytes(8)), "expected whole numbers"),
    "a fractional size": (safetensors_bytes({"a": entry(shape=[2.0])}, bytes(8)), "expected whole numbers"),
    "sizes that are true": (safetensors_bytes({"a": entry(0, 4, [True])}, bytes(4)), "expected whole numbers"),
    "three offsets": (safetensors_bytes({"a": {**entry(), "data_offsets": [0, 8, 8]}}, bytes(8)), "3 offsets"),
    "a missing field": (safetensors_bytes({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "needs dtype, shape"),
    "an absurd shape": (safetensors_bytes({"a": entry(shape=[2**40, 2**40])}, bytes(8)), "needs 4835703278458516698"),
    "offsets past the end": (safetensors_bytes({"a": entry()}, bytes(4)), "the file holds 4 bytes of data"),
    "offsets backwards": (safetensors_bytes({"a": entry(8, 0)}, bytes(8)), "its offsets span -8"),
    "an overlap": (safetensors_bytes({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "'a' and 'b' overlap"),
    "bytes of no tensor": (safetensors_bytes({"a": entry()}, bytes(16)), "describes 8 bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_by_its_rule(tmp_path, name):
    content, text = BROKEN[name]
    (tmp_path / "model.safetensors").write_bytes(content)
    before = everything_in(tmp_path)
    with pytest.raises(CheckpointError, match=text):
        open_safetensors(tmp_path)
    assert everything_in(tmp_path) == before


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_is_an_error_of_ours_or_harmless(tmp_path_factory, data):
    good = safetensors_bytes({"a": entry(0, 8), "b": entry(8, 16, [1, 2])}, bytes(16))
    place = data.draw(st.integers(0, len(good) - 1))
    change = data.draw(st.binary(min_size=0, max_size=9))
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    path.write_bytes(good[:place] + change + good[place + data.draw(st.integers(0, 9)) :])
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return
    for name in file.names():
        file.read(name, whole(file.info(name).shape))


def sharded(directory, weight_map=None, **shards):
    shards = shards or {"one": {"a": np.zeros(2)}, "two": {"b": np.ones(3)}}
    for name, values in shards.items():
        save_file(values, directory / f"{name}.safetensors")
    weight_map = weight_map or {t: f"{name}.safetensors" for name, values in shards.items() for t in values}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_one_checkpoint(tmp_path):
    sharded(tmp_path)
    source = open_safetensors(tmp_path)
    assert sorted(source.names()) == ["a", "b"]
    np.testing.assert_array_equal(source.read("b", (slice(1, 3),)), [1, 1])


def test_a_missing_shard_is_named(tmp_path):
    sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards .* missing: two\.safetensors\. Finish the download"):
        open_safetensors(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    sharded(tmp_path, weight_map, one={"a": np.zeros(2)}, two={"a": np.ones(2), "b": np.ones(2)})
    with pytest.raises(CheckpointError, match="'a' is in both"):
        open_safetensors(tmp_path)


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path):
    sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"places tensor 'c' in two\.safetensors, which does not hold it"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/out.safetensors", "a/../../out.safetensors"])
def test_an_index_entry_outside_the_directory_is_refused(tmp_path, name):
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    save_file({"a": np.zeros(2)}, tmp_path / "out.safetensors")
    sharded(inside, {"a": name})
    with pytest.raises(CheckpointError, match="must stay inside its directory"):
        open_safetensors(inside)


@pytest.mark.parametrize("weight_map", [{}, [], {"a": 3}, {"a": "model.bin"}, None])
def test_an_index_without_a_usable_map_is_refused(tmp_path, weight_map):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"weight_map|must map to a \.safetensors file"):
        open_safetensors(tmp_path)


def test_a_link_out_of_the_checkpoint_is_refused(tmp_path):
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    save_file({"a": np.zeros(2)}, tmp_path / "elsewhere.safetensors")
    (inside / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        open_safetensors(inside)


def make_loop(path):
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    "make, text",
    [(os.mkfifo, "is not a file"), (os.mkdir, "is not a file"), (make_loop, "loop|symbolic links|holds neither")],
)
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, make, text):
    make(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=text):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "d/" * 3000 + "x", "\ud800"])
def test_an_index_entry_that_no_system_takes_is_refused(tmp_path, name):
    index = json.dumps({"weight_map": {"a": f"{name}.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="cannot be a file of a checkpoint"):
        open_safetensors(tmp_path)


def test_the_links_of_the_hub_cache_are_followed_to_its_own_blobs_only(tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"a": np.zeros(2)}, blobs / "0123")
    link = snapshot / "model.safetensors"
    link.symlink_to("../../blobs/0123")
    assert list(open_safetensors(snapshot).names()) == ["a"]
    link.unlink()
    save_file({"a": np.zeros(2)}, tmp_path / "models--other--name")
    link.symlink_to(tmp_path / "models--other--name")
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        open_safetensors(snapshot)


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match=r"pickled pytorch_model\.bin: convert .* or pass allow_pickle=True"):
        open_safetensors(tmp_path)
