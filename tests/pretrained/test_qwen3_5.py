"""Qwen3.5 as it is published: a text model inside a larger one, rotary positions of images, heads that are left out."""

import json
import warnings

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from dew.nn.attention import AttentionSpec
from dew.nn.rope import YarnScaling
from dew.pretrained import CheckpointError, describe, load_pretrained, save_pretrained
from tests.pretrained.checkpoints import FIXTURES

TEXT = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
OUTER = {
    "image_token_id": 60,
    "video_token_id": 61,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
    "vision_config": {"model_type": "qwen3_5_vision", "depth": 1},
}
VISION = {"model.visual.patch_embed.proj.weight": np.ones((8, 3, 2, 4, 4), np.float32)}
IMAGES = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}


@pytest.fixture
def wrapped(copied):
    """Put a text fixture inside a larger model, its tensors beside others; gives the directory."""

    def wrap(name, tensors, **outer):
        directory = copied(TEXT[name])
        inner = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
        save_file(inner | VISION, directory / "model.safetensors")
        text = json.loads((directory / "config.json").read_text())
        config = {"model_type": name, "architectures": ["Some"], "text_config": text, **OUTER, **outer}
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return wrap


@pytest.mark.parametrize("name", TEXT)
def test_the_text_model_inside_a_larger_one_is_read_and_saved_alone(name, wrapped, tensors, tmp_path):
    stored = tensors(FIXTURES / TEXT[name])
    directory = wrapped(name, stored)
    with pytest.warns(UserWarning, match=r"the tensors model\.visual\.\* are left out\. .* layers that read images"):
        loaded = load_pretrained(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = load_pretrained(FIXTURES / TEXT[name])
    assert loaded.module == plain.module
    jax.tree.map(np.testing.assert_array_equal, loaded.variables, plain.variables)
    save_pretrained(tmp_path / "out", loaded.module, loaded.variables, loaded.config)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], "text_config" in written) == (TEXT[name], False)
    assert tensors(tmp_path / "out").keys() == stored.keys()


def test_other_parts_than_those_for_images_are_refused(wrapped, tensors):
    stored = tensors(FIXTURES / "qwen3_5_text") | {"audio.proj.weight": np.ones(3, np.float32)}
    with (
        pytest.warns(UserWarning, match=r"model\.visual"),
        pytest.raises(CheckpointError, match=r"no part of the model reads: audio\.proj\.weight"),
    ):
        load_pretrained(wrapped("qwen3_5", stored))


@pytest.mark.parametrize(
    "outer, text",
    [
        ({"text_config": None}, "lacks 'text_config'"),
        ({"text_config": {"model_type": "qwen3"}}, "text_config must be the config of a qwen3_5_text. Received: "),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is stated twice and differently.*in text_config .*=True"),
        ({"logit_scale": 2.0}, r"not supported: logit_scale=2\.0"),
    ],
)
def test_an_outer_config_that_is_not_understood_is_refused(outer, text, wrapped, tensors):
    with pytest.raises(CheckpointError, match=text):
        describe(wrapped("qwen3_5", tensors(FIXTURES / "qwen3_5_text"), **outer))


def test_what_the_outer_config_alone_states_counts(wrapped, tensors):
    text = json.loads((FIXTURES / "qwen3_5_text" / "config.json").read_text())
    text = {name: value for name, value in text.items() if name not in ("tie_word_embeddings", "dtype", "model_type")}
    outer = {"text_config": text, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    module = describe(wrapped("qwen3_5", tensors(FIXTURES / "qwen3_5_text"), **outer)).module
    assert (module.tie_embeddings, module.dtype) == (True, "bfloat16")


def test_positions_in_images_change_nothing_of_a_text(copied):
    plain = describe(FIXTURES / "qwen3_5_text").module
    parameters = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}
    assert describe(copied("qwen3_5_text", rope_parameters=parameters | IMAGES)).module == plain
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    module = describe(copied("qwen3_5_moe_text", rope_parameters=parameters | IMAGES | scaled)).module
    rotary = module.layers[2].attention.rotary
    assert isinstance(rotary.scaling, YarnScaling)
    assert (rotary.scaling.factor, rotary.scaling.original_max_length, rotary.fraction) == (4.0, 64, 0.25)


def test_fields_of_published_configs_beside_those_of_the_class_are_understood(copied):
    beside = {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": "absent",
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_hidden_layers": 4,
    }
    described = describe(copied("qwen3_5_text", **beside))
    mixers = [layer.mixer for layer in described.module.layers]
    assert [isinstance(mixer, AttentionSpec) for mixer in mixers] == [False, False, False, True]


@pytest.mark.parametrize("name", TEXT.values())
def test_an_export_does_not_promise_heads_that_were_left_out(name, copied, tmp_path):
    loaded = load_pretrained(copied(name, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False))
    save_pretrained(tmp_path / "out", loaded.module, loaded.variables, loaded.config)
    assert "mtp" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.reference
@pytest.mark.parametrize("name", TEXT)
def test_the_larger_model_of_transformers_gives_a_text_these_logits(name, tmp_path, reference):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    text = AutoModelForCausalLM.from_pretrained(FIXTURES / TEXT[name], attn_implementation="eager")
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": 2, "num_position_embeddings": 4}
    rotary = text.config.rope_parameters | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    inner = text.config.to_dict() | {"rope_parameters": rotary}
    outer = OUTER | {"tie_word_embeddings": text.config.tie_word_embeddings, "vision_config": vision}
    config = AutoConfig.for_model(name, text_config=inner, **outer)
    whole = AutoModelForImageTextToText.from_config(config, dtype="float32")
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    whole = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "whole", attn_implementation="eager", experts_implementation="eager"
    )
    tokens = reference(TEXT[name])["tokens"] % 60  # none stands for an image
    with torch.no_grad():
        want = whole(input_ids=torch.tensor(tokens)).logits.numpy()
    with pytest.warns(UserWarning, match=r"model\.visual"):
        loaded = load_pretrained(tmp_path / "whole")
    got = np.asarray(jax.jit(loaded.module.apply)(loaded.variables, tokens))
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
