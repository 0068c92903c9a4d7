"""Each GGUF architecture gives the config, the names and the values of the checkpoint it was made from."""

import json
import types

import jax
import numpy as np
import pytest

from dew.pretrained import CheckpointError, describe, load_pretrained
from dew.pretrained.formats import GGUF_ARCHITECTURES
from dew.pretrained.formats.architecture import GgufFields
from dew.pretrained.gguf import GgufFile
from tests.pretrained import gguf_files
from tests.pretrained.checkpoints import FIXTURES


@pytest.fixture
def written(tmp_path, tensors):
    """Write a fixture as a GGUF file of an architecture."""

    def write(name, architecture, fields=None, **changed):
        config = json.loads((FIXTURES / name / "config.json").read_text())
        path = tmp_path / f"{architecture}.gguf"
        values = {**tensors(FIXTURES / name), **changed}
        gguf_files.write(path, config, values, fields=fields, architecture=architecture)
        return path

    return write


def test_qwen3_is_the_checkpoint_it_was_made_from(written):
    path = written("qwen3", "qwen3", {"attention.key_length": 16, "attention.value_length": 16})
    want = load_pretrained(FIXTURES / "qwen3", dtype="float32")
    got = load_pretrained(path, mesh={"fsdp": 2})
    assert got.module == want.module
    jax.tree.map(np.testing.assert_array_equal, got.variables, want.variables)


def test_a_head_of_qwen3_is_128_wide_unless_the_file_says(written):
    path = written("qwen3", "qwen3", {"rope.dimension_count": None})
    assert GGUF_ARCHITECTURES["qwen3"].config(GgufFile(path))["head_dim"] == 128


def test_qwen2_metadata_and_names(written):
    config = GGUF_ARCHITECTURES["qwen2"].config(GgufFile(written("llama", "qwen2")))
    want = json.loads((FIXTURES / "llama" / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert "head_dim" not in config
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size"):
        assert config[name] == want[name], name
    rename = GGUF_ARCHITECTURES["qwen2"]
    assert rename.tensor_name("blk.7.attn_q.bias") == "model.layers.7.self_attn.q_proj.bias"
    assert rename.row_order("model.layers.7.self_attn.q_proj.bias", 48, config) is None
    with pytest.raises(CheckpointError, match="heads of 16 are not the width 48 divided by 4"):
        rename.config(GgufFile(written("llama", "qwen2", {"rope.dimension_count": 16})))


def frequency_table(theta, head_dim, factor, low=1.0, high=4.0, original=8192):
    """Divisors of the frequencies as llama.cpp's converter writes them, one by one."""
    table = []
    for j in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * j / head_dim)
        if wavelength < original / high:
            table.append(1.0)
        elif wavelength > original / low:
            table.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_by_its_table(written, factor):
    table = frequency_table(500000.0, 12, factor)
    assert 1.0 < table.max() == factor
    path = written("llama", "llama", {"rope.freq_base": 500000.0}, **{"rope_freqs.weight": table})
    scaling = load_pretrained(path).module.layers[0].attention.rotary.scaling
    got = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_length)
    assert got == (factor, 1.0, 4.0, 8192)
    table[-1] *= 1.001
    path = written("llama", "llama", {"rope.freq_base": 500000.0}, **{"rope_freqs.weight": table})
    with pytest.raises(CheckpointError, match=r"no part of the model reads: rope_freqs\.weight"):
        load_pretrained(path)


@pytest.mark.parametrize("architecture", sorted(GGUF_ARCHITECTURES))
def test_a_field_that_is_not_read_is_refused_in_every_architecture(written, architecture):
    fields = {"attention.sliding_window": 16, "attention.temperature_length": 4096, "logit_scale": 1.0}
    path = written(
        "llama", architecture, {**fields, "attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": None}
    )
    with pytest.raises(CheckpointError, match=rf"not supported: .*{architecture}\.attention\.temperature_length=4096"):
        describe(path)


FIELDS = {
    "gemma": ("gemma", {"attention.key_length": 8, "attention.value_length": 8}),
    "gemma2": (
        "gemma2",
        {"attn_logit_softcapping": 12.0, "final_logit_softcapping": 2.0, "attention.sliding_window": 8},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "attention.sliding_window": 8,
            "rope.freq_base": 20000.0,
            "rope.freq_base_swa": 500.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
        },
    ),
    "phi3": ("phi3", {"attention.sliding_window": 16, "rope.dimension_count": 4}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {"attention.scale": 0.2, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0},
    ),
    "smollm3": ("smollm3", {}),
    "qwen2": ("qwen2", {}),
    "cohere2": ("cohere2", {"attention.sliding_window": 8, "logit_scale": 0.25, "rope.scaling.type": "none"}),
    "glm4": ("glm4", {}),
    "gpt2": ("gpt2", {}),
    "gptneox": ("gpt_neox", {"use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {}),
    "olmo2 with a window": (
        "olmo3",
        {
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, True, False],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
}
# What the fixture sets in other ways than the format can say: rotation, the factor of queries, kinds of layers.
NOT_IN_GGUF = {
    "gemma2": {"query_pre_attn_scalar"},
    "gpt2": {"attn_pdrop", "embd_pdrop", "resid_pdrop"},
    "gemma3": {"query_pre_attn_scalar", "layer_types", "_sliding_window_pattern"},
    "phi3": {"rope_parameters", "original_max_position_embeddings"},
    "smollm3": {"no_rope_layers", "no_rope_layer_interval"},
    "cohere2": {"layer_types"},
    "starcoder2": {"sliding_window"},
    "qwen2": {"layer_types", "use_sliding_window", "max_window_layers", "sliding_window", "rope_parameters"},
}


@pytest.mark.parametrize("architecture", FIELDS)
def test_weights_and_config_are_those_of_the_checkpoint(written, architecture):
    name, fields = FIELDS[architecture]
    architecture = architecture.split()[0]
    path = written(name, architecture, fields)
    config = GGUF_ARCHITECTURES[architecture].config(GgufFile(path))
    want = json.loads((FIXTURES / name / "config.json").read_text())
    left_out = {"architectures", "rope_parameters", *NOT_IN_GGUF.get(architecture, ())}
    differing = {key: (value, want[key]) for key, value in config.items() if key in want and value != want[key]}
    assert {key: pair for key, pair in differing.items() if key not in left_out} == {}
    if architecture not in ("phi3", "qwen2"):
        assert config.get("rope_parameters") == want.get("rope_parameters")
    # The kinds of layers may differ, and with them the banks: layer by layer they are the same.
    options = {"mesh": {"fsdp": 2}, "dtype": "float32", "scan_layers": False}
    got = load_pretrained(path, **options).variables
    expected = load_pretrained(FIXTURES / name, **options).variables
    # The scales lose a rounding to the one that was added.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-7), got, expected)


@pytest.mark.parametrize("architecture", sorted(GGUF_ARCHITECTURES))
def test_every_tensor_of_the_table_is_one_of_the_packages(architecture):
    import gguf

    kind = gguf_files.KINDS[architecture]
    known = {gguf.TENSOR_NAMES[tensor].replace("blk.{bid}.", "") for tensor in gguf.MODEL_TENSORS[kind]}
    table = GGUF_ARCHITECTURES[architecture]
    assert {*table.tensors, *table.layer_tensors} <= known | {"output"}


def test_longrope_is_read_from_its_tables(written):
    want = load_pretrained(FIXTURES / "phi3", dtype="float32").module
    rotary = json.loads((FIXTURES / "phi3" / "config.json").read_text())["rope_parameters"]
    fields = {
        "attention.sliding_window": 16,
        "rope.dimension_count": 4,
        "rope.scaling.original_context_length": rotary["original_max_position_embeddings"],
        "rope.scaling.attn_factor": want.layers[0].attention.rotary.scaling.attention_factor,
    }
    tables = {
        f"rope_factors_{kind}.weight": np.array(rotary[f"{kind}_factor"], np.float32) for kind in ("long", "short")
    }
    for kind in ({}, {"rope.scaling.type": "longrope"}):
        assert load_pretrained(written("phi3", "phi3", {**fields, **kind}, **tables)).module.layers == want.layers
    changed = load_pretrained(written("phi3", "phi3", {**fields, "rope.scaling.attn_factor": 1.5}, **tables)).module
    assert changed.layers[0].attention.rotary.scaling.attention_factor == 1.5
    with pytest.raises(CheckpointError, match=r"longrope needs 'rope_factors_short\.weight' with 2 factors"):
        describe(written("phi3", "phi3", fields, **{**tables, "rope_factors_short.weight": np.ones(3, np.float32)}))
    with pytest.raises(CheckpointError, match=r"longrope needs 'rope_factors_short\.weight'"):
        describe(written("phi3", "phi3", {**fields, "rope.scaling.type": "longrope"}))
    alone = written(
        "phi3", "phi3", {"rope.dimension_count": 4}, **{"rope_factors_short.weight": np.ones(2, np.float32)}
    )
    with pytest.raises(CheckpointError, match=r"no part of the model reads: rope_factors_short\.weight"):
        load_pretrained(alone)


@pytest.mark.parametrize(
    "name, architecture, fields, text",
    [
        (
            "llama",
            "llama",
            {"rope.scaling.kinds": [0] * 999},
            r"llama\.rope\.scaling\.kinds=\[0, 0, 0, 0, 0, 0, \.\.\.\]$",
        ),
        ("cohere2", "cohere2", {"attention.sliding_window": 8}, "lacks cohere2.logit_scale"),
        ("cohere2", "cohere2", {"logit_scale": 1.0}, "lacks cohere2.attention.sliding_window"),
        (
            "cohere2",
            "cohere2",
            {"logit_scale": 1.0, "attention.sliding_window": 8, "attention.sliding_window_pattern": [True]},
            "must be a period or a flag for each of 3 layers",
        ),
        ("gpt_neox", "gptneox", {"attention.head_count_kv": 2}, "2 key/value heads and 4 query heads of 8"),
        ("gpt_neox", "gptneox", {"use_parallel_residual": 1}, "use_parallel_residual must be true or false"),
        ("gpt2", "gpt2", {"attention.head_count_kv": 2}, r"not supported: gpt2\.attention\.head_count_kv=2"),
        ("glm4", "glm4", {"rope.dimension_count": 16}, "rope.dimension_count=16 exceeds the 8 of a head"),
        *((arch, arch, {"block_count": 2**31 - 1}, "at most 4096 layers") for arch in ("smollm3", "gemma2", "gpt2")),
        ("cohere2", "cohere2", {"block_count": 2**31 - 1, "attention.sliding_window": 8}, "at most 4096 layers"),
        *((arch, arch, {"rope.dimension_count": 4}, "heads of 4 are not") for arch in ("smollm3", "olmo2", "granite")),
        ("olmo3", "olmo2", {"rope.scaling.type": "yarn"}, r"lacks olmo2\.rope\.scaling\.factor"),
    ],
)
def test_what_an_architecture_cannot_say_is_refused(written, name, architecture, fields, text):
    path = written(name, architecture, fields)
    with pytest.raises(CheckpointError, match=text):
        describe(path)


def test_a_period_of_windows_and_its_flags_say_the_same(written):
    fields = {"attention.sliding_window": 8, "logit_scale": 0.25}
    by_period = describe(written("cohere2", "cohere2", {**fields, "attention.sliding_window_pattern": 3})).module
    by_flags = describe(
        written("cohere2", "cohere2", {**fields, "attention.sliding_window_pattern": [True, True, False]})
    ).module
    assert by_period == by_flags == load_pretrained(FIXTURES / "cohere2", dtype="float32").module


def test_heads_as_wide_as_no_model_has_are_refused_before_their_frequencies_are_made(written):
    width = {"rope.dimension_count": 2**31 - 2, "attention.key_length": 2**31 - 2, "attention.value_length": 2**31 - 2}
    with pytest.raises(CheckpointError, match="heads of 2147483646 dimensions; at most 65536"):
        describe(written("llama", "llama", width, **{"rope_freqs.weight": np.ones(6, np.float32)}))


@pytest.mark.parametrize("value", [1e60, 1e-60, float("inf"), float("nan"), -1.0, 0, 10**400, [1.0] * 999, "1", True])
def test_a_number_that_float32_does_not_hold_is_refused_in_few_words(value):
    file = types.SimpleNamespace(path="a.gguf", metadata={"llama.scale": value}, tensors={})
    with pytest.raises(CheckpointError, match=r"llama\.scale: expected a positive number\. Received: .{1,60}$"):
        GgufFields(file, "llama").number("scale")
