"""Mamba-2 blocks and hybrids: the slow decoder's numbers, decoding, padding, documents, every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn.block import DecoderLayer, LayerSpec, Surroundings
from dew.nn.embed import EmbeddingSpec
from dew.nn.mamba2 import Mamba2Spec
from dew.nn.masks import causal_visibility
from dew.nn.mlp import MlpSpec
from dew.nn.norm import NormSpec
from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout, LayoutRefused
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.stacks import stack_view
from dew.training.trainer import Trainer
from tests.nn.decoder_laws import TOKENS, Decoder
from tests.tiny import tiny_decoder, tiny_layer
from tests.tools.test_collectives import tool

NORM = NormSpec(eps=1e-5)
GROUPED = Mamba2Spec(num_heads=8, head_dim=8, num_groups=4, state_size=6, norm_groups=4, bias=True, conv_bias=False)
SHARED = Mamba2Spec(num_heads=4, head_dim=16, num_groups=1, state_size=8, conv_kernel=3, step_limits=(0.02, 0.9))
MODELS = {
    "mamba": (LayerSpec(mixer=GROUPED, mlp=None, norm=NORM),) * 3,
    "hybrid": (
        *(LayerSpec(mixer=SHARED, mlp=MlpSpec(features=64), norm=NORM, residual_scale=0.7),) * 2,
        dataclasses.replace(tiny_layer(num_kv_heads=4), residual_scale=0.7),
    )
    * 2,
}
DTYPES = (jnp.dtype("float32"), jnp.dtype("bfloat16"))


@functools.cache
def decoder(name):
    def drawn(path, leaf, noise):
        if path[-1] == "dt_bias":  # steps within the limits: beyond them no gradient moves these
            return 0.3 * noise - 1.0
        return leaf + {"kernel": 0.1, "embedding": 0.5}.get(path[-1], 0.3) * noise

    return Decoder(tiny_decoder(layers=MODELS[name], tie_embeddings=name == "hybrid"), drawn)


@pytest.mark.parametrize("name", MODELS)
def test_whole_sequences_are_the_slow_decoder(name):
    decoder(name).assert_whole_sequences_are_the_slow_decoder()


@pytest.mark.parametrize("name", MODELS)
def test_decoding_with_a_cache_is_the_slow_decoder(name):
    decoder(name).assert_decoding_is_the_slow_decoder((7, *[1] * 9, 8))  # the later block goes on from the state too


@pytest.mark.parametrize("name", MODELS)
def test_padding_on_the_left_touches_neither_the_state_nor_the_tail(name):
    # Rows begin within the first block, the second and the third.
    decoder(name).assert_padding_on_the_left_changes_nothing([12, 23])


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_are_each_document_alone(name):
    decoder(name).assert_packed_documents_are_each_alone()


@pytest.mark.parametrize("name, storage", [("mamba", {"scan_layers": False}), ("hybrid", {"bank_layers": 1})], ids=str)
def test_storage_changes_nothing(name, storage):
    decoder(name).assert_storage_changes_nothing(**storage)


MESHES = {
    "data=8": MeshSpec(),
    "fsdp=2": MeshSpec(fsdp=2),
    "sequence=8": MeshSpec(sequence=8),  # slices of 6 tokens: documents end on their borders and within them
    "fsdp=2 tensor=2": MeshSpec(fsdp=2, tensor=2),
    "tensor=4": MeshSpec(tensor=4),
    "sequence=4 tensor=2": MeshSpec(sequence=4, tensor=2),
    "sequence=2 tensor=2 fsdp=2": MeshSpec(sequence=2, tensor=2, fsdp=2),
    "stage=2 tensor=2": MeshSpec(stage=2, tensor=2, microbatches=2),
}


@pytest.mark.parametrize(
    "name, mesh",
    [
        *(("mamba", mesh) for mesh in MESHES if mesh != "stage=2 tensor=2"),  # 3 layers
        *(("hybrid", mesh) for mesh in MESHES if mesh not in ("data=8", "fsdp=2", "sequence=8")),
    ],
)
def test_a_mesh_trains_as_one_device(name, mesh):
    # The backward pass of one mesh computes all of it again, the shifts over sequence included.
    fields = {"remat": "full"} if mesh == "sequence=4 tensor=2" else {}
    decoder(name).assert_a_mesh_trains_as_one_device(MESHES[mesh], **fields)


def test_a_residual_stream_in_float32_keeps_what_bfloat16_rounds_away():
    module, variables = decoder("mamba").module, decoder("mamba").variables
    embedding = EmbeddingSpec(scale=300.0)  # what the blocks add is small beside it

    def hidden(module, params):
        return jax.jit(lambda params: module.apply({"params": params}, TOKENS, method="hidden_states"))(params)

    def error(layers):
        wide, narrow = (module.clone(layers=layers, embedding=embedding, dtype=dtype) for dtype in DTYPES)
        want, got = (hidden(each, variables["params"]) for each in (wide, narrow))
        assert (want.dtype, got.dtype) == DTYPES
        blocks_only = want - hidden(wide.clone(layers=()), outside)
        return float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(blocks_only))

    outside = {name: part for name, part in variables["params"].items() if not name.startswith("layers")}
    in_float32 = tuple(dataclasses.replace(layer, residual_in_float32=True) for layer in module.layers)
    assert error(in_float32) < 0.75 * error(module.layers)
    weights = stack_view(module).unstack(variables)["params"]["layers_0"]
    layer = DecoderLayer(module.features, in_float32[0])
    x, narrow = jnp.zeros((1, 4, module.features)), jax.tree.map(lambda leaf: leaf.astype("bfloat16"), weights)
    added, *_ = layer.apply({"params": narrow}, x, Surroundings(causal_visibility(4)))
    assert np.abs(added).max() > 0.1
    np.testing.assert_array_equal(added, added.astype("bfloat16").astype("float32"))  # what is added is computed so


@pytest.mark.parametrize("spec", [GROUPED, SHARED], ids=["groups split", "groups whole"])
def test_on_a_tensor_mesh_a_layer_sends_its_output_and_the_sums_of_its_norm(spec):
    module = tiny_decoder(layers=(LayerSpec(mixer=spec, mlp=None, norm=NORM),) * 3)
    mesh = build_mesh(MeshSpec(tensor=4), jax.devices()[:4])
    trainer = Trainer(LanguageModel(module), "adamw", mesh=mesh, layout=Layout(min_shard=1, tolerance=1.0))
    B, T = 4, 24
    found = tool.step_report(trainer, {"tokens": np.ones((B, T + 1), np.int32)}).found
    looped = [item for item in found if item.trips and item.group_size > 1]
    assert {(item.axes, item.trips) for item in looped} == {(("tensor",), (3,))}
    gathered = {int(np.prod(shape)) for item in looped if item.kind == "all-gather" for shape in item.shapes}
    # Groups that do not divide are stored in parts, and every device's heads read them all: 32 is the width.
    P, W = spec.state_size, spec.conv_kernel
    assert gathered <= ({32 * P, B * T * P, P * W, P} if spec is SHARED else set())
    reduced = [item for item in looped if item.kind == "all-reduce"]
    forward = sorted(int(np.prod(shape)) for item in reduced if item.phase == "forward" for shape in item.shapes)
    assert forward == sorted([B * T * 32, B * T * spec.norm_groups])
    largest = max(int(np.prod(shape)) for item in looped for shape in item.shapes)
    assert largest == B * T * 32


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_groups": 3}, "num_heads a multiple of num_groups.* num_groups=3"),
        ({"norm_groups": 5}, "norm_groups=5"),
        ({"state_size": 0}, "positive sizes.* state_size=0"),
        ({"activation": "tanh"}, "activation must be one of .* Received: activation='tanh'"),
        ({"norm_eps": 0.0}, "positive eps. Received: norm_eps=0.0"),
        ({"step_limits": (0.5, 0.1)}, r"0 <= low < high. Received: step_limits=\(0.5, 0.1\)"),
    ],
)
def test_specs_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GROUPED, **fields)


def test_a_block_says_what_it_is_not():
    layer = MODELS["mamba"][0]
    with pytest.raises(ValueError, match=r"the block has no AttentionSpec\. Received: mixer=Mamba2Spec"):
        _ = layer.attention
    with pytest.raises(ValueError, match=r"without an mlp has nothing in parallel\. Received: placement='parallel'"):
        dataclasses.replace(layer, placement="parallel")


def test_a_sequence_that_the_mesh_cannot_cut_is_refused():
    module, variables = decoder("mamba").module, decoder("mamba").variables
    with jax.set_mesh(build_mesh(MeshSpec(sequence=8))), pytest.raises(LayoutRefused, match="Received: length=16"):
        jax.eval_shape(module.apply, variables, TOKENS[:, :16])
