"""What is refused is refused before anything is placed, by name, with the files as they were."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dew.placement.layout import Layout, LayoutRefused
from dew.placement.mesh import MeshSpec, build_mesh
from dew.pretrained import CheckpointError, describe, load_pretrained, load_variables
from dew.pretrained.hub import locate
from tests.pretrained.checkpoints import FIXTURES, read_header, safetensors_bytes

SPLIT = Layout(min_shard=1, tolerance=0.5)


def rewrite(directory, values):
    save_file(values, directory / "model.safetensors", {"format": "pt"})


def test_a_truncated_file(copied, refused):
    directory = copied()
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(directory, "is truncated or damaged; fetch it again")


def test_a_corrupted_header(copied, refused):
    directory = copied()
    path = directory / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    refused(directory, "the header claims 18446744073709551615 bytes")


def test_overlapping_tensors(copied, refused):
    directory = copied()
    header, data = read_header(directory / "model.safetensors")
    header["model.norm.weight"]["data_offsets"] = [4, 4 + 48 * 4]
    (directory / "model.safetensors").write_bytes(safetensors_bytes(header, data))
    refused(directory, "overlap")


def test_a_missing_tensor(copied, refused, tensors):
    directory = copied()
    values = tensors(directory)
    del values["model.layers.1.mlp.up_proj.weight"]
    rewrite(directory, values)
    refused(directory, r"nothing was loaded\. missing tensors: model\.layers\.1\.mlp\.up_proj\.weight\.")


def test_an_extra_tensor(copied, refused, tensors):
    directory = copied()
    rewrite(directory, {**tensors(directory), "model.layers.0.self_attn.q_norm.weight": np.ones(12, np.float32)})
    refused(directory, r"no part of the model reads: model\.layers\.0\.self_attn\.q_norm\.weight\.")


def test_a_layer_that_the_config_does_not_count(copied, refused):
    refused(copied(num_hidden_layers=2), r"no part of the model reads: model\.layers\.2\..* and 4 more")


def test_a_wrong_shape(copied, refused):
    refused(
        copied(intermediate_size=81), r"mlp\.gate_proj\.weight has shape \(80, 48\), the config asks for \(81, 48\)"
    )


def test_a_missing_head(copied, refused):
    refused(copied(tie_word_embeddings=False), r"missing tensors: lm_head\.weight")


def test_a_tied_head_that_differs_from_the_table(copied, refused, tensors):
    refused(copied("llama_untied", tie_word_embeddings=True), "ties the head to model.embed_tokens.weight, but")


def test_a_tied_head_that_repeats_the_table_is_read(copied, tensors, reference):
    directory = copied()
    values = tensors(directory)
    rewrite(directory, {**values, "lm_head.weight": values["model.embed_tokens.weight"].copy()})
    want = load_pretrained(FIXTURES / "llama").variables
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(directory).variables, want)


def test_a_tied_head_beside_a_table_of_another_shape(copied, refused):
    directory = copied()
    header, data = read_header(directory / "model.safetensors")
    begin, end = header.pop("model.embed_tokens.weight")["data_offsets"]
    header["unread"] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # no bytes, and 2**60 rows to compare
        header[name] = {"dtype": "F32", "shape": [2**60, 0], "data_offsets": [0, 0]}
    (directory / "model.safetensors").write_bytes(safetensors_bytes(header, data))
    refused(directory, r"model\.embed_tokens\.weight has shape \(1152921504606846976, 0\), the config asks for")


def test_a_tied_head_has_the_name_of_its_family(copied, tensors, refused):
    directory = copied("gpt_neox", tie_word_embeddings=True)
    refused(directory, r"ties the head to gpt_neox\.embed_in\.weight, but the file holds another embed_out\.weight")
    values = tensors(directory)
    rewrite(directory, {**values, "embed_out.weight": values["gpt_neox.embed_in.weight"].copy()})
    assert "lm_head" not in load_pretrained(directory).variables["params"]
    rewrite(directory, {**values, "embed_out.weight": np.ones((), np.float32)})
    refused(directory, r"holds another embed_out\.weight")


def test_tensors_of_old_exports_that_hold_no_weight_are_ignored(copied, tensors):
    directory = copied()
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32) for i in range(3)}
    rewrite(directory, {**tensors(directory), **old})
    load_pretrained(directory)


def test_a_missing_shard(copied, refused, tensors):
    directory = copied()
    index = {"weight_map": dict.fromkeys(tensors(directory), "model-00001-of-00002.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(directory, r"1 of 1 shards .* are missing: model-00001-of-00002\.safetensors")


def test_shards_load_as_the_single_file_does(copied, tensors):
    directory = copied("qwen3")
    values = tensors(directory)
    (directory / "model.safetensors").unlink()
    names = sorted(values)
    weight_map = {}
    for number in range(3):  # layers straddle the files
        part = f"model-{number}.safetensors"
        save_file({name: values[name] for name in names[number::3]}, directory / part)
        weight_map |= dict.fromkeys(names[number::3], part)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    want = load_pretrained(FIXTURES / "qwen3").variables
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(directory).variables, want)


def test_a_mesh_that_does_not_divide(refused, copied):
    refused(copied(), "reserves 3 devices", ValueError, mesh={"fsdp": 3})


def test_a_layout_that_replicates_too_much(refused, copied):
    layout = Layout(rules={"embed": None, "vocab": None, "mlp": None, "head_dim": None}, min_shard=1, tolerance=0.0)
    refused(copied(), "stay whole on every device", LayoutRefused, mesh={"fsdp": 8}, layout=layout)


def test_stages_that_do_not_divide_the_layers(refused, copied):
    refused(copied(), "layers do not divide by 2, or", LayoutRefused, mesh={"stage": 2})


def test_a_config_that_is_no_json(copied, refused):
    directory = copied()
    (directory / "config.json").write_text("{")
    refused(directory, "config.json: not valid JSON")


def test_a_config_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("source", ["./nowhere", "/no/where", "nowhere", "a/b/c", "hf://one", ""])
def test_a_source_that_is_not_there(source):
    with pytest.raises(FileNotFoundError, match=r"Expected a directory, a \.gguf file, 'org/name"):
        locate(source)


def test_a_file_that_is_no_checkpoint(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"A checkpoint is a directory, a \.gguf file"):
        locate(tmp_path / "model.bin")


def test_a_link_to_a_config_elsewhere(copied, tmp_path, refused):
    directory = copied()
    shutil.move(directory / "config.json", tmp_path / "secret.json")
    (directory / "config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        load_pretrained(directory)


def test_an_unknown_dtype(refused, copied):
    refused(copied(), "dtype must be one of .* Did you mean 'bfloat16'", ValueError, dtype="bfloat61")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16", np.dtype("float16"), "float32"])
def test_dtype_is_that_of_the_computation_and_the_weights(dtype):
    loaded = load_pretrained(FIXTURES / "llama", dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.variables)} == {jnp.dtype(dtype)}
    assert jnp.dtype(loaded.module.dtype) == jnp.dtype(dtype)


def test_weights_keep_the_dtype_of_the_file_unless_told(copied, tensors):
    directory = copied(dtype="bfloat16")
    rewrite(directory, {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors(directory).items()})
    loaded = load_pretrained(directory)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.variables)} == {jnp.dtype("bfloat16")}
    assert loaded.module.dtype == "bfloat16"
    masters = load_pretrained(directory, param_dtype="float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(masters.variables)} == {jnp.dtype("float32")}
    assert masters.module.dtype == "bfloat16"
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(b.dtype), b), loaded.variables, masters.variables)


def test_without_a_dtype_in_the_config_the_file_decides(copied, tensors):
    directory = copied(dtype="absent")
    rewrite(directory, {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors(directory).items()})
    assert describe(directory).module.dtype == "bfloat16"


def test_describe_then_load_later_with_other_storage():
    described = describe(FIXTURES / "qwen3_untied")
    module = described.module.clone(scan_layers=False, remat="full")
    mesh = build_mesh(MeshSpec(fsdp=4, tensor=2))
    variables = load_variables(described, mesh=mesh, layout=SPLIT, module=module)
    assert set(variables["params"]) == {"embed_tokens", "layers_0", "layers_1", "layers_2", "lm_head", "norm"}
    banked = load_variables(described, mesh=mesh, layout=SPLIT)
    for layer in range(3):
        got = variables["params"][f"layers_{layer}"]
        want = jax.tree.map(lambda leaf, layer=layer: leaf[layer], banked["params"]["layers_0_2"])
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_the_bundle_says_where_it_came_from():
    loaded = load_pretrained(FIXTURES / "llama", mesh=MeshSpec(fsdp=2), layout=SPLIT)
    assert loaded.source == str(FIXTURES / "llama")
    assert loaded.layout is SPLIT
    assert loaded.mesh.shape["fsdp"] == 2
    assert loaded.config["model_type"] == "llama"
    assert loaded.tokenizer is None
    assert loaded.generation_config == {}


def test_the_published_names_of_gpt2_are_read(copied, tensors):
    directory = copied("gpt2")
    stored = {name.removeprefix("transformer."): value for name, value in tensors(directory).items()}
    stored["h.0.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))  # a causal mask
    rewrite(directory, stored)
    got, want = load_pretrained(directory).variables, load_pretrained(FIXTURES / "gpt2").variables
    jax.tree.map(np.testing.assert_array_equal, got, want)
