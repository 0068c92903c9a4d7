"""The GGUF reader gives Hugging Face names, row order and values by slices, and refuses damaged or foreign files."""

import json
import struct

import gguf
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.placement.layout import Layout
from dew.pretrained import CheckpointError, describe, load_pretrained
from dew.pretrained.source import whole
from tests.pretrained import gguf_files
from tests.pretrained.checkpoints import FIXTURES

Q = gguf.GGMLQuantizationType


@pytest.fixture
def written(tmp_path, tensors):
    """Write a fixture as GGUF."""

    def write(name="llama", quantised=None, fields=None, **changed):
        config = json.loads((FIXTURES / name / "config.json").read_text())
        values = {**tensors(FIXTURES / name), **changed}
        path = tmp_path / f"{name}.gguf"
        gguf_files.write(path, config, {k: v for k, v in values.items() if v is not None}, quantised, fields)
        return path

    return write


def test_the_config_and_every_weight_are_those_of_the_checkpoint(written):
    got, want = load_pretrained(written()), load_pretrained(FIXTURES / "llama")
    assert got.module == want.module
    jax.tree.map(np.testing.assert_array_equal, got.variables, want.variables)


def test_biases_are_reordered_with_their_rows(written):
    # The GGUF carries no llama3 scaling, so only the weights are compared.
    got, want = load_pretrained(written("llama_untied")), load_pretrained(FIXTURES / "llama_untied")
    jax.tree.map(np.testing.assert_array_equal, got.variables, want.variables)
    assert not got.module.tie_embeddings


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2}])
@pytest.mark.parametrize("quantised", [Q.Q8_0, Q.Q4_1, Q.Q4_0, Q.F16, Q.BF16])
def test_parts_of_a_quantised_file_are_the_parts_of_the_whole(written, quantised, mesh):
    path = written(quantised=quantised)
    want = load_pretrained(path)
    got = load_pretrained(path, mesh=mesh, layout=Layout(min_shard=1, tolerance=0.5))
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(got.variables))
    jax.tree.map(np.testing.assert_array_equal, got.variables, want.variables)


@pytest.mark.parametrize("quantised", [Q.Q8_0, Q.Q4_1, Q.Q5_1, Q.F16, Q.BF16])
def test_values_are_those_of_the_package(written, tensors, quantised):
    # Width 80 is no whole number of blocks; down_proj stays float32, the others of width 48 too but for 16-bit types.
    wide = {"model.embed_tokens.weight": np.random.default_rng(0).normal(size=(96, 64)).astype(np.float32)}
    path = written(quantised=quantised, **wide)
    source = describe(path).open_source()
    name = "model.embed_tokens.weight"
    want = gguf.quants.dequantize(gguf.quants.quantize(wide[name], quantised), quantised)
    np.testing.assert_array_equal(source.read(name, whole((96, 64))), want)
    np.testing.assert_array_equal(source.read(name, (slice(3, 50), slice(17, 43))), want[3:50, 17:43])
    assert source.info(name) == ((96, 64), np.float32)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_slice_of_a_reordered_tensor_is_that_slice(tmp_path_factory, data):
    values = np.random.default_rng(1).normal(size=(32, 64)).astype(np.float32)
    config = {
        "num_hidden_layers": 1,
        "max_position_embeddings": 8,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "head_dim": 16,
        "vocab_size": 32,
        "rope_parameters": {"rope_theta": 10000.0},
    }
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    name = "model.layers.0.self_attn.k_proj.weight"
    gguf_files.write(path, config, {name: values, "model.embed_tokens.weight": values}, Q.Q8_0)
    source = describe(path).open_source()
    want = gguf.quants.dequantize(gguf.quants.quantize(values, Q.Q8_0), Q.Q8_0)  # a row's blocks do not mix rows
    index = tuple(slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in values.shape)
    np.testing.assert_array_equal(source.read(name, index), want[index])


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"expert_count": 8}, r"llama\.expert_count=8"),
        ({"attention.sliding_window": 4096}, r"not supported: llama\.attention\.sliding_window=4096"),
        ({"rope.scaling.type": "ntk"}, r"rope\.scaling\.type='ntk' is not supported"),
        ({"rope.scaling.type": "linear"}, r"the metadata lacks llama\.rope\.scaling\.factor"),
        ({"attention.key_length": 16}, "heads that rotate in part"),
        ({"attention.layer_norm_rms_epsilon": None}, r"lacks llama\.attention\.layer_norm_rms_epsilon"),
        ({"block_count": None}, r"lacks llama\.block_count"),
        ({"block_count": 0}, "block_count must be a positive whole number"),
        ({"embedding_length": "wide"}, "embedding_length must be a positive whole number. Received: 'wide'"),
        ({"rope.freq_base": float("nan")}, "expected a positive number. Received: nan"),
    ],
)
def test_fields_that_change_the_computation_are_refused_by_name(written, fields, text):
    path = written(fields=fields)
    with pytest.raises(CheckpointError, match=text):
        describe(path)


@pytest.mark.parametrize("count", [3, 0, "many"])
def test_a_part_of_a_split_file_says_what_to_do(tmp_path, count):
    writer = gguf.GGUFWriter(tmp_path / "a-00001-of-00003.gguf", "llama")
    (writer.add_string if isinstance(count, str) else writer.add_uint16)("split.count", count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=rf"is one of {count} files of a checkpoint\. Join them first"):
        describe(tmp_path / "a-00001-of-00003.gguf")


def test_linear_scaling_is_read(written):
    rotary = describe(written(fields={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})).module.layers[0]
    assert rotary.attention.rotary.scaling.factor == 4.0


def test_a_frequency_table_is_not_ignored(written, refused):
    path = written(**{"rope_freqs.weight": np.ones(6, np.float32)})
    refused(path, r"no part of the model reads: rope_freqs\.weight")


@pytest.mark.parametrize("name", ["mamba", "gpt-oss"])
def test_another_architecture_is_refused(name, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", name)
    writer.add_uint32(f"{name}.block_count", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=rf"architecture '{name}' is not supported\. Known: llama"):
        describe(tmp_path / "a.gguf")


def header(num_tensors=0, num_keys=0, rest=b"", version=3):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


def text(value):
    return struct.pack("<Q", len(value)) + value


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


BROKEN = {
    "too short": (b"GGUF", "has 4 bytes"),
    "another magic": (b"NOPE" + bytes(40), "does not start with"),
    "another version": (header(version=1), "is GGUF version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
    "absurd counts": (header(2**60, 2**60), "claims 1152921504606846976 tensors"),
    "keys that are not there": (header(0, 3), "the file ends at 24"),
    "an endless string": (header(0, 1, struct.pack("<Q", 2**62)), "asks for 4611686018427387904 bytes"),
    "an endless array": (header(0, 1, key(b"a", 9, struct.pack("<IQ", 4, 2**61))), "claims 2305843009213693952 items"),
    "a long array": (header(0, 1, key(b"a", 9, struct.pack("<IQ", 4, 1000))), "asks for 4000 bytes"),
    "endless strings": (header(0, 1, key(b"a", 9, struct.pack("<IQ", 8, 2**61))), "claims 2305843009213693952 items"),
    "many strings": (
        header(0, 1, key(b"a", 9, struct.pack("<IQ", 8, 1000))),
        "claims 1000 strings, more than the file",
    ),
    "an array of arrays": (header(0, 1, key(b"a", 9, struct.pack("<IQ", 9, 1))), "value type 9"),
    "an unknown type": (header(0, 1, key(b"a", 77, bytes(8))), "value type 77"),
    "a key twice": (header(0, 2, key(b"a", 4, bytes(4)) * 2), "'a' appears twice"),
    "not UTF-8": (header(0, 1, key(b"\xff\xfe", 4, bytes(4))), "is not UTF-8"),
    "an odd alignment": (header(0, 1, key(b"general.alignment", 4, struct.pack("<I", 3))), "power of two"),
    "many dimensions": (header(1, 0, text(b"t") + struct.pack("<I", 999)), "has 999 dimensions"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_header_is_refused_by_its_rule(tmp_path, name, refused):
    content, message = BROKEN[name]
    (tmp_path / "a.gguf").write_bytes(content)
    refused(tmp_path / "a.gguf", message)


@pytest.mark.parametrize("left", [100, 0.5, 0.99])
def test_a_truncated_file_is_refused_before_anything_is_placed(written, refused, left):
    path = written()
    whole_file = path.read_bytes()
    path.write_bytes(whole_file[: left if left > 1 else int(left * len(whole_file))])
    data = r"the file holds .* bytes of data\. The file is truncated"
    refused(path, data if left < 1 else "the file ends at")


def test_a_tensor_that_begins_inside_another_is_refused_before_anything_is_placed(written, refused):
    path = written()
    raw = bytearray(path.read_bytes())
    # Behind the name: the number of dimensions, one size, the type, and then the offset.
    place = raw.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8 + 4
    raw[place : place + 8] = struct.pack("<Q", 0)
    path.write_bytes(raw)
    refused(path, "overlap")


def test_a_tensor_type_that_cannot_be_read_is_named(written, refused):
    path = written()
    raw = bytearray(path.read_bytes())
    place = raw.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    raw[place : place + 4] = struct.pack("<I", 250)
    path.write_bytes(raw)
    refused(path, r"'output_norm\.weight' has ggml type 250")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_is_an_error_of_ours_or_harmless(tmp_path_factory, data):
    directory = tmp_path_factory.getbasetemp() / "damaged-gguf"
    directory.mkdir(exist_ok=True)
    good = directory / "good.gguf"
    if not good.exists():
        from safetensors.numpy import load_file

        config = json.loads((FIXTURES / "llama" / "config.json").read_text())
        gguf_files.write(good, config, load_file(FIXTURES / "llama" / "model.safetensors"), Q.Q8_0)
    raw = good.read_bytes()
    place = data.draw(st.integers(0, min(len(raw) - 1, 4000)))
    change = data.draw(st.binary(min_size=0, max_size=9))
    bad = directory / "bad.gguf"
    bad.write_bytes(raw[:place] + change + raw[place + data.draw(st.integers(0, 9)) :])
    try:
        source = describe(bad).open_source()
    except ValueError:  # the tokenizer and the model speak in ValueErrors too
        return
    for name in source.names():
        source.read(name, whole(source.info(name).shape))


@pytest.mark.weights
@pytest.mark.slow
def test_smollm2_continues_as_the_reference_does(smollm2_file):
    """Greedy continuation, all tokens at once: each is the best after the reference's tokens before it."""
    want = json.loads((FIXTURES / "smollm2.json").read_text())
    loaded = load_pretrained(smollm2_file, mesh={"fsdp": 4, "tensor": 2})
    assert loaded.module.dtype == "float32"
    rows = [(row["prompt"], row["prompt_ids"], row["output_ids"]) for row in want["prompts"]]
    tokens = np.zeros((4, max(len(prompt) + len(output) for _, prompt, output in rows)), np.int32)
    for number, (words, prompt, output) in enumerate(rows):
        assert loaded.tokenizer.encode(words) == prompt
        tokens[number, : len(prompt) + len(output)] = prompt + output
    with jax.set_mesh(loaded.mesh):
        best = np.asarray(jax.jit(lambda *inputs: loaded.module.apply(*inputs).argmax(-1))(loaded.variables, tokens))
    for number, (_, prompt, output) in enumerate(rows):
        assert best[number, len(prompt) - 1 : len(prompt) + len(output) - 1].tolist() == output
