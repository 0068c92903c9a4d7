"""gpt-oss: its config field by field, and experts packed in MXFP4, which are unpacked part by part as they load."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn.rope import RotarySpec, YarnScaling
from dew.placement.layout import Layout
from dew.placement.stacks import stack_view
from dew.pretrained import CheckpointError, describe, load_pretrained, save_pretrained
from dew.pretrained import mxfp4 as packing
from dew.pretrained import place as placing
from dew.pretrained.families import FAMILIES
from dew.pretrained.families.fields import Fields
from dew.pretrained.mxfp4 import unpack, unpacked
from dew.pretrained.safetensors import open_safetensors
from dew.pretrained.source import TensorInfo
from dew.tree import named_leaves
from tests.pretrained.checkpoints import FIXTURES

PACKED = "gpt_oss_mxfp4"
SPLIT = Layout(min_shard=1, tolerance=1.0)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def slow_unpack(blocks, scales):
    """Expand one value after the other: sign, magnitude, power of two."""
    values = np.empty((*scales.shape, 32))
    for place in np.ndindex(*scales.shape):
        for number in range(32):
            code = int(blocks[place][number // 2]) >> 4 * (number % 2) & 15
            sign = -1.0 if code >= 8 else 1.0
            scale = float("nan") if scales[place] == 255 else 2.0 ** (int(scales[place]) - 127)
            values[place][number] = sign * E2M1[code % 8] * scale
    return values.reshape(*scales.shape[:-1], -1)


def slow_experts(tensors, layer):
    """The experts of a layer as its leaves, unpacked by loops."""
    name = f"model.layers.{layer}.mlp.experts"
    gate_up, down = (
        slow_unpack(tensors[f"{name}.{each}_blocks"], tensors[f"{name}.{each}_scales"]).swapaxes(1, 2)
        for each in ("gate_up_proj", "down_proj")
    )
    return {"gate_proj": gate_up[..., ::2], "up_proj": gate_up[..., 1::2], "down_proj": down}


def test_every_byte_under_every_scale_is_its_sign_magnitude_and_power_of_two():
    blocks = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for scale in (0, 1, 2, 60, 126, 127, 128, 200, 252, 254, 255):
        scales = np.full(16, scale, np.uint8)
        with np.errstate(over="ignore"):
            want = slow_unpack(blocks, scales).astype(np.float32)
        got = unpack(blocks, scales)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got.astype(np.float32), want)
    assert np.isinf(unpack(blocks, np.full(16, 254, np.uint8)).astype(np.float32)).any(), "6 * 2**127 has no float32"


def test_blocks_expand_as_in_transformers(reference):
    found = reference(PACKED)
    got = unpack(found["blocks"], found["scales"]).swapaxes(1, 2)
    np.testing.assert_array_equal(got, found["values"].view(jnp.bfloat16))


def test_a_packed_checkpoint_computes_the_logits_of_the_reference(reference):
    want = reference(PACKED)
    assert want["entropy"] < 0.5
    model = load_pretrained(FIXTURES / PACKED, dtype="float32")
    tokens = jnp.asarray(want["tokens"])
    got = jax.jit(model.module.apply)(model.variables, tokens)
    np.testing.assert_allclose(got, want["logits"], rtol=0, atol=1e-5 * np.abs(want["logits"]).max())


@pytest.mark.parametrize("mesh", [{"expert": 4, "fsdp": 2}, {"tensor": 4, "fsdp": 2}], ids=str)
def test_each_device_unpacks_its_own_part_in_small_pieces(mesh, monkeypatch, tensors):
    reads = []
    read = packing._Unpacked.read

    def counted(self, name, index):
        values = read(self, name, index)
        reads.append((name, values.nbytes))
        return values

    monkeypatch.setattr(packing._Unpacked, "read", counted)
    monkeypatch.setattr(placing, "PIECE_BYTES", 512)
    model = load_pretrained(FIXTURES / PACKED, mesh=mesh, layout=SPLIT)
    params = stack_view(model.module).unstack(model.variables)["params"]
    stored = tensors(FIXTURES / PACKED)
    for layer in range(2):
        for name, want in slow_experts(stored, layer).items():
            got = params[f"layers_{layer}"]["mlp"]["experts"][name]
            assert got.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(got, np.float32), want)
    bank = model.variables["params"]["layers_0"]["mlp"]["experts"]["gate_proj"]
    assert len(bank.sharding.device_set) == 8
    assert bank.addressable_shards[0].data.size == bank.size // 8
    sizes = [nbytes for name, nbytes in reads if "experts" in name and not name.endswith("_bias")]
    assert max(sizes) <= 512
    # Gate and up are every second column of one tensor, which each of them reads whole; layers and bytes are two too.
    assert sum(sizes) == 2 * (2 * 2 * bank.size + bank.size) * 2


def test_a_plain_checkpoint_is_read_as_it_is():
    source = open_safetensors(FIXTURES / "gpt_oss")
    assert unpacked(source, "here") is source


def test_what_is_packed_computes_in_bfloat16_and_is_written_unpacked(tmp_path, tensors):
    model = load_pretrained(FIXTURES / PACKED, mesh={"expert": 2, "tensor": 2}, layout=SPLIT)
    assert (model.module.dtype, model.module.param_dtype) == ("bfloat16", "bfloat16")
    save_pretrained(tmp_path / "out", model.module, model.variables, model.config)
    stored, written = tensors(FIXTURES / PACKED), tensors(tmp_path / "out")
    for layer in range(2):
        name, want = f"model.layers.{layer}.mlp.experts", slow_experts(stored, layer)
        gate_up = written[f"{name}.gate_up_proj"].astype(np.float32)
        np.testing.assert_array_equal(gate_up[..., ::2], want["gate_proj"])
        np.testing.assert_array_equal(gate_up[..., 1::2], want["up_proj"])
        np.testing.assert_array_equal(written[f"{name}.down_proj"].astype(np.float32), want["down_proj"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    again = load_pretrained(tmp_path / "out")
    assert again.module == model.module
    want = named_leaves(model.variables)
    for path, leaf in named_leaves(again.variables).items():
        np.testing.assert_array_equal(leaf, want[path])


class Listed:
    """Names, shapes and dtypes without values."""

    def __init__(self, tensors):
        self.tensors, self.nbytes = tensors, 0

    def names(self):
        return self.tensors

    def info(self, name):
        return TensorInfo(*self.tensors[name])


BLOCKS, SCALES = ((4, 64, 2, 16), np.dtype(np.uint8)), ((4, 64, 2), np.dtype(np.uint8))


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"w_scales": None}, "'w_blocks' is packed and has no 'w_scales' beside it"),
        ({"w_blocks": None}, "'w_scales' is packed and has no 'w_blocks' beside it"),
        ({"w": SCALES}, "'w' is stored both packed and as it is; remove one of them"),
        ({"w_blocks": (BLOCKS[0], np.dtype(np.int8))}, "must be uint8. Received: blocks=int8, scales=uint8"),
        ({"w_scales": (SCALES[0], np.dtype(np.float32))}, "must be uint8. Received: blocks=uint8, scales=float32"),
        ({"w_blocks": ((4, 64, 2, 8), BLOCKS[1])}, r"'w' needs blocks .* Received: blocks \(4, 64, 2, 8\)"),
        ({"w_scales": ((4, 64, 1), BLOCKS[1])}, r"a scale for each. Received: blocks .* scales \(4, 64, 1\)"),
        ({"w_blocks": ((256, 2, 16), BLOCKS[1])}, r"needs blocks \[experts, out, in / 32, 16\]"),
    ],
    ids=str,
)
def test_pairs_that_break_the_format_are_refused_by_name(changed, text):
    stored = {"w_blocks": BLOCKS, "w_scales": SCALES, **changed}
    with pytest.raises(CheckpointError, match=f"here: .*{text}"):
        unpacked(Listed({name: info for name, info in stored.items() if info}), "here")
    good = unpacked(Listed({"w_blocks": BLOCKS, "w_scales": SCALES, "b": SCALES}), "here")
    assert list(good.names()) == ["b", "w"]
    assert good.info("w") == TensorInfo((4, 64, 64), np.dtype(jnp.bfloat16))


def test_a_packed_checkpoint_that_does_not_fit_its_config_places_nothing(copied):
    before = len(jax.live_arrays())
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj has shape \(4, 64, 64\), the config asks for \(4, 64, 96\)"
    ):
        load_pretrained(copied(PACKED, intermediate_size=48))
    assert len(jax.live_arrays()) <= before


def test_the_published_config_is_understood(tmp_path):
    published = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": 201088,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    module = describe(tmp_path).module
    local, whole = (layer.attention for layer in module.layers[:2])
    assert (local.window, whole.window, local.sinks, local.bias, local.out_bias) == (128, None, True, True, True)
    yarn = YarnScaling(factor=32.0, original_max_length=4096, truncate=False)
    assert local.rotary == whole.rotary == RotarySpec(theta=150000.0, scaling=yarn)
    experts = module.layers[0].mlp
    assert (experts.num_experts, experts.router.top_k, experts.limit, experts.alpha) == (32, 4, 7.0, 1.702)
    assert (experts.bias, experts.router.bias, experts.router.score) == (True, True, "softmax_of_chosen")
    assert (module.dtype, module.norm.cast) == ("bfloat16", "after_scale")
    read = lambda **fields: FAMILIES["gpt_oss"].translate(Fields(published | fields, "here"))  # noqa: E731
    with pytest.raises(CheckpointError, match="experts_per_token=8"):
        read(experts_per_token=8)
    with pytest.raises(CheckpointError, match="initial_context_length=2048"):
        read(initial_context_length=2048)


def test_absent_fields_take_the_defaults_of_the_config_class(copied):
    absent = ("head_dim", "num_key_value_heads", "attention_bias", "rms_norm_eps", "rope_parameters", "layer_types")
    absent += ("sliding_window", "swiglu_limit", "swiglu_alpha", "num_experts_per_tok", "tie_word_embeddings")
    module = describe(copied("gpt_oss", **dict.fromkeys(absent, "absent"), num_attention_heads=8)).module
    attention, experts = module.layers[0].attention, module.layers[0].mlp
    assert (attention.head_dim, attention.num_kv_heads, attention.bias, attention.window) == (64, 8, True, 128)
    assert [layer.attention.window for layer in module.layers] == [128, None, 128]
    yarn = YarnScaling(factor=32.0, original_max_length=4096, truncate=False)
    assert attention.rotary == RotarySpec(theta=150000.0, scaling=yarn)
    assert (module.norm.eps, experts.limit, experts.alpha, experts.router.top_k) == (1e-5, 7.0, 1.702, 4)
    assert not module.tie_embeddings


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"quantization_config": {"quant_method": "awq"}}, "must have quant_method 'mxfp4'.*Received.*awq"),
        ({"quantization_config": {"quant_method": "mxfp4", "group_size": 16}}, "no field but .*group_size"),
        ({"hidden_act": "gelu"}, "limit must be positive and replaces the activation.*'gelu'"),
        ({"swiglu_limit": 0.0}, "swiglu_limit must be a positive number"),
        ({"swiglu_alpha": -1.0}, "swiglu_alpha must be a positive number"),
        ({"num_experts_per_tok": 5}, "top_k=5 exceeds the 4 experts"),
        ({"num_experts": 4}, "num_experts=4"),
        ({"sliding_window": None}, "layer_types has sliding_attention, but no sliding_window is in use"),
        ({"attention_dropout": 1.5}, r"attention_dropout=1\.5"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_refused_by_name(copied, fields, text):
    with pytest.raises(CheckpointError, match=text):
        describe(copied("gpt_oss", **fields))


@pytest.mark.reference
def test_transformers_computes_the_same_logits_from_the_packed_checkpoint_and_from_its_export(tmp_path, reference):
    import torch
    from transformers import AutoModelForCausalLM, Mxfp4Config

    shutil.copytree(FIXTURES / PACKED, tmp_path / "packed")
    model = load_pretrained(FIXTURES / PACKED, dtype="float32")
    save_pretrained(tmp_path / "out", model.module, model.variables, model.config)
    tokens = reference(PACKED)["tokens"]
    got = np.asarray(jax.jit(model.module.apply)(model.variables, tokens))
    for name, options in {"packed": {"quantization_config": Mxfp4Config(dequantize=True)}, "out": {}}.items():
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, attn_implementation="eager", dtype=torch.float32, **options
        )
        with torch.no_grad():
            want = theirs(torch.tensor(tokens)).logits.numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
