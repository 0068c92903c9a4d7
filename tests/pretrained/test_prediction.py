"""Layers that predict further tokens in checkpoints: loaded under their names, written again, left out when asked."""

import dataclasses
import json
import re
import warnings

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dew.cli.main import main
from dew.placement.layout import Layout
from dew.placement.stacks import stack_view
from dew.pretrained import CheckpointError, describe, load_pretrained, save_pretrained
from dew.pretrained.export import export_config
from dew.pretrained.safetensors import SINGLE_NAME
from dew.tree import named_leaves
from tests.pretrained.checkpoints import FIXTURES

# The layer whose kind those have that predict, and the field that counts them.
FAMILIES = {
    "deepseek_v3": (2, "num_nextn_predict_layers"),
    "qwen3_next": (1, "num_nextn_predict_layers"),
    "qwen3_5_text": (1, "mtp_num_hidden_layers"),
    "qwen3_5_moe_text": (2, "mtp_num_hidden_layers"),
}
WIDTH = 32
WAY_OUT = r"Load without .*: prediction_layers=False, or --no-prediction-layers of a dew command\.$"


def further_tensors(name, stored, depth):
    """Draw the tensors of layers that predict, each block with the values of a layer of its kind."""
    generator, found = np.random.default_rng(0), {}
    drawn = lambda *shape: generator.normal(size=shape).astype(np.float32)  # noqa: E731
    like = f"model.layers.{FAMILIES[name][0]}."
    count = json.loads((FIXTURES / name / "config.json").read_text())["num_hidden_layers"]
    for index in range(depth):
        prefix = f"model.layers.{count + index}." if name == "deepseek_v3" else f"mtp.layers.{index}."
        for tensor, value in stored.items():
            if tensor.startswith(like):
                found[tensor.replace(like, prefix)] = value + np.float32(index)
        if name == "deepseek_v3":
            found |= {f"{prefix}{each}.weight": drawn(WIDTH) for each in ("enorm", "hnorm", "shared_head.norm")}
            found[f"{prefix}eh_proj.weight"] = drawn(WIDTH, 2 * WIDTH)
            found[f"{prefix}embed_tokens.weight"] = stored["model.embed_tokens.weight"]
            found[f"{prefix}shared_head.head.weight"] = stored["lm_head.weight"]
    if name != "deepseek_v3":
        norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        found |= {f"mtp.{each}.weight": drawn(WIDTH) for each in norms} | {"mtp.fc.weight": drawn(WIDTH, 2 * WIDTH)}
    return found


@pytest.fixture
def predicting(copied, tensors):
    """Write a fixture with layers that predict; gives the directory and all tensors."""

    def build(name, depth=1, stated=True, **fields):
        directory = copied(name, **({FAMILIES[name][1]: depth if stated else "absent"} | fields))
        stored = tensors(directory)
        stored |= further_tensors(name, stored, depth)
        save_file(stored, directory / "model.safetensors")
        return directory, stored

    return build


def leaves(loaded):
    return named_leaves(jax.device_get(stack_view(loaded.module).unstack(loaded.variables)["params"]))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_they_are_loaded_under_their_names_and_written_again(name, depth, predicting, tmp_path):
    directory, stored = predicting(name, depth)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, plain = load_pretrained(directory), load_pretrained(FIXTURES / name)
    assert (loaded.module.prediction.depth, loaded.module.prediction.is_shared) == (depth, name != "deepseek_v3")
    assert loaded.module.clone(prediction=None) == plain.module
    got, want = leaves(loaded), leaves(plain)
    for path, value in want.items():
        np.testing.assert_array_equal(got.pop(path), value, err_msg=path)
    like, count = FAMILIES[name][0], len(plain.module.layers)
    for path, value in want.items():
        layer, _, rest = path.partition("/")
        for index in range(depth) if layer == f"layers_{like}" else ():
            np.testing.assert_array_equal(got.pop(f"prediction_{index}/block/{rest}"), value + np.float32(index))
    for index in range(1 if loaded.module.prediction.is_shared else depth):
        names = {"embedding_norm/scale": "mtp.pre_fc_norm_embedding", "hidden_norm/scale": "mtp.pre_fc_norm_hidden"}
        names |= {"norm/scale": "mtp.norm", "proj/kernel": "mtp.fc"}
        if name == "deepseek_v3":
            own = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
            names = {path: f"model.layers.{count + index}.{each}" for path, each in zip(names, own, strict=True)}
        for path, tensor in names.items():
            value = stored[f"{tensor}.weight"]
            if path == "proj/kernel":  # the embedding's half is first
                value = np.stack([value[:, :WIDTH].T, value[:, WIDTH:].T])
            np.testing.assert_array_equal(got.pop(f"prediction_{index}/{path}"), value, err_msg=path)
    assert not got
    save_pretrained(tmp_path / "out", loaded.module, loaded.variables, loaded.config)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {key: value.tobytes() for key, value in written.items() if key in stored} == {
        key: value.tobytes() for key, value in stored.items() if key in written
    }
    # Experts that are packed in the file are written apart.
    assert {key for key in stored if ".experts." not in key} <= written.keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config[FAMILIES[name][1]] == depth
    again = load_pretrained(tmp_path / "out")
    assert again.module == loaded.module
    jax.tree.map(np.testing.assert_array_equal, leaves(again), leaves(loaded))


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_logits_do_not_depend_on_them_and_any_mesh_reads_the_same(name, predicting, reference):
    directory, _ = predicting(name)
    mesh = {"fsdp": 2, "tensor": 2}
    loaded = load_pretrained(directory, mesh=mesh, layout=Layout(min_shard=1, tolerance=1.0))
    jax.tree.map(np.testing.assert_array_equal, leaves(loaded), leaves(load_pretrained(directory)))
    want = reference(name)
    got = np.asarray(jax.jit(loaded.module.apply)(jax.device_get(loaded.variables), want["tokens"]))
    assert np.abs(got - want["logits"]).max() <= 1e-4 * np.abs(want["logits"]).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_that_does_not_count_them_has_one_where_the_tensors_are(name, predicting, copied):
    directory, _ = predicting(name, stated=False)
    assert describe(directory).module.prediction.depth == 1
    assert load_pretrained(directory).module.prediction.depth == 1
    (directory / "model.safetensors").unlink()
    assert describe(directory).module.prediction is None
    counted = json.loads((directory / "config.json").read_text()) | {FAMILIES[name][1]: 1}
    (directory / "config.json").write_text(json.dumps(counted))
    assert describe(directory).module.prediction.depth == 1


def test_commands_count_and_write_them_unless_told_otherwise(predicting, tmp_path, capsys):
    directory, _ = predicting("qwen3_next")
    plan = ["plan", str(directory), "--mesh", "fsdp=2", "--schedule", "1f1b", "--min-shard", "1"]
    assert main(plan) == 1
    assert "scores between the stages' passes" in capsys.readouterr().err
    assert main([*plan, "--no-prediction-layers"]) == 0
    for options, count in ([], 1), (["--no-prediction-layers"], 0):
        assert main(["convert", str(directory), str(tmp_path / str(count)), *options]) == 0
        names = load_file(tmp_path / str(count) / "model.safetensors").keys()
        assert any(name.startswith("mtp.") for name in names) == bool(count)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_that_counts_what_is_not_there_has_none(name, copied, tmp_path):
    loaded = load_pretrained(copied(name, **{FAMILIES[name][1]: 1}))
    assert loaded.module.prediction is None
    save_pretrained(tmp_path / "out", loaded.module, loaded.variables, loaded.config)
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get(FAMILIES[name][1], 0) == 0


def test_names_are_read_from_an_index_alone(predicting):
    directory, stored = predicting("deepseek_v3")
    (directory / "model.safetensors").unlink()
    shard = "model-00001-of-00001.safetensors"
    index = {"weight_map": dict.fromkeys(stored, shard)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert describe(directory).module.prediction.depth == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_they_are_left_out_when_asked(name, predicting, tmp_path):
    directory, _ = predicting(name, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, plain = load_pretrained(directory, prediction_layers=False), load_pretrained(FIXTURES / name)
    assert loaded.module == plain.module
    jax.tree.map(np.testing.assert_array_equal, loaded.variables, plain.variables)
    save_pretrained(tmp_path / "out", loaded.module, loaded.variables, loaded.config)
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get(FAMILIES[name][1], 0) == 0
    assert not any("mtp" in key or "eh_proj" in key for key in load_file(tmp_path / "out" / "model.safetensors"))


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "llama"])
def test_leaving_out_what_is_not_there_is_refused(name, refused):
    refused(FIXTURES / name, "and this checkpoint has none. Leave the argument out", prediction_layers=False)


def test_what_does_not_fit_the_config_is_refused_by_name(predicting, refused):
    directory, stored = predicting("deepseek_v3", num_nextn_predict_layers=0)
    refused(directory, rf"no part of the model reads: model\.layers\.3\.eh_proj\.weight.*\. {WAY_OUT}")
    load_pretrained(directory, prediction_layers=False)
    directory, stored = (directory, {key: value for key, value in stored.items() if not key.endswith("hnorm.weight")})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    save_file(stored, directory / "model.safetensors")
    refused(directory, rf"missing tensors: model\.layers\.3\.hnorm\.weight\. {WAY_OUT}")
    save_file({key: value for key, value in stored.items() if key != "model.norm.weight"}, directory / SINGLE_NAME)
    refused(directory, r"missing tensors: model\.norm\.weight, model\.layers\.3\.hnorm\.weight\.$")


def test_commands_name_the_option_that_leaves_out_what_does_not_fit(predicting, tmp_path, capsys):
    directory, stored = predicting("qwen3_next")
    save_file({key: value for key, value in stored.items() if key != "mtp.fc.weight"}, directory / SINGLE_NAME)
    assert main(["convert", str(directory), str(tmp_path / "out")]) == 1
    assert re.search(rf"no part of the model reads: mtp\..*\. {WAY_OUT}", capsys.readouterr().err)
    assert main(["convert", str(directory), str(tmp_path / "out"), "--no-prediction-layers"]) == 0


def test_heads_and_tables_of_their_own_are_refused_by_name(predicting, refused):
    directory, _ = predicting("qwen3_5_text", mtp_use_dedicated_embeddings=True)
    refused(directory, "mtp_use_dedicated_embeddings=true gives them their own.*" + WAY_OUT)
    assert load_pretrained(directory, prediction_layers=False).module.prediction is None


def test_a_config_that_cannot_state_them_is_refused(predicting):
    module = describe(predicting("deepseek_v3")[0]).module
    dense = dataclasses.replace(module.prediction.layer, mlp=module.layers[0].mlp)
    other = module.clone(prediction=dataclasses.replace(module.prediction, layer=dense))
    with pytest.raises(ValueError, match=r"deepseek_v3: its config cannot express this model's prediction"):
        export_config(other, {"model_type": "deepseek_v3"})
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers must be a whole number of 0 or more"):
        describe(predicting("qwen3_next", num_nextn_predict_layers=-1)[0])
