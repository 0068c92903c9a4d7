"""The same weights under the names of another export load to the same model; other models stay refused."""

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from dew.pretrained import CheckpointError, load_pretrained
from tests.pretrained.checkpoints import FIXTURES

EXPORTS = {
    "wrapped": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "adapted": lambda name: f"base_model.model.{name}",
    "a part": lambda name: f"language_model.{name}",
    "a base in a part": lambda name: name.replace("model.", "language_model.model.", 1),
    "a base that is a part": lambda name: name.replace("model.", "model.language_model.", 1),
    "a base alone": lambda name: name.removeprefix("model."),
}


@pytest.mark.parametrize("fixture", ["llama", "qwen3_untied"])
@pytest.mark.parametrize("export", EXPORTS)
def test_names_of_other_exports_are_read(copied, tensors, export, fixture):
    directory = copied(fixture)
    values = {EXPORTS[export](name): value for name, value in tensors(directory).items()}
    save_file(values, directory / "model.safetensors")
    want = load_pretrained(FIXTURES / fixture).variables
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(directory).variables, want)


def test_a_larger_model_is_not_taken_for_its_part(copied, tensors):
    directory = copied()
    values = {EXPORTS["a base that is a part"](name): value for name, value in tensors(directory).items()}
    save_file({**values, "model.vision_tower.weight": np.ones(3, np.float32)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no part of the model reads: model\.vision_tower\.weight"):
        load_pretrained(directory)


def test_two_tensors_that_would_have_one_name_are_refused(copied, tensors):
    directory = copied()
    values = tensors(directory)
    table = values.pop("model.embed_tokens.weight")
    wrapped = {f"module.{name}": value for name, value in values.items()}
    both = {"module.model.embed_tokens.weight": table, "model.embed_tokens.weight": table.copy()}
    save_file({**wrapped, **both}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"would be 'model\.embed_tokens\.weight'"):
        load_pretrained(directory)


def test_a_missing_tensor_is_still_missing_under_a_prefix(copied, tensors):
    directory = copied()
    values = {f"module.{name}": value for name, value in tensors(directory).items() if name != "model.norm.weight"}
    save_file(values, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors: .*model\.embed_tokens\.weight"):
        load_pretrained(directory)
