"""Hybrids of gated delta nets and attention: the slow decoder's numbers, decoding, padding, documents, every mesh."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from dew.nn.block import LayerSpec
from dew.nn.gated_delta_net import GatedDeltaNetSpec
from dew.nn.mlp import MlpSpec
from dew.nn.norm import NormSpec
from dew.nn.rope import RotarySpec
from dew.placement.layout import Layout, LayoutRefused
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.stacks import stack_view
from tests.nn.decoder_laws import TOKENS, Decoder
from tests.tiny import tiny_decoder, tiny_layer

NORM = NormSpec(eps=1e-5, offset=1.0, cast="after_scale")
DELTA = GatedDeltaNetSpec(num_heads=8, head_dim=6, num_keys=4, key_dim=8)
ATTENTION = tiny_layer(num_kv_heads=4, gate=True, qk_norm=NORM, rotary=RotarySpec(theta=100.0, fraction=0.5)).attention
LAYERS = tuple(LayerSpec(mixer=mixer, mlp=MlpSpec(features=64), norm=NORM) for mixer in (DELTA, ATTENTION)) * 2


@functools.cache
def decoder():
    def drawn(path, leaf, noise):
        if path[-1] == "A_log":
            return 0.5 * noise - 1.0
        return leaf + {"kernel": 0.12, "embedding": 2.0}.get(path[-1], 0.3) * noise

    return Decoder(tiny_decoder(layers=LAYERS, norm=NORM), drawn)


def test_whole_sequences_are_the_slow_decoder():
    decoder().assert_whole_sequences_are_the_slow_decoder()


@pytest.mark.parametrize("mesh", [None, MeshSpec(tensor=2, sequence=2)], ids=str)
def test_decoding_with_a_cache_is_the_slow_decoder(mesh):
    own = decoder()  # its variables are of no mesh
    with jax.set_mesh(build_mesh(MeshSpec(), jax.devices()[:1]) if mesh is None else build_mesh(mesh)):
        # A later block of several tokens goes on from the state too.
        own.assert_decoding_is_the_slow_decoder((7, *[1] * 7, 7, 1, 1, 1))


def test_padding_on_the_left_touches_neither_the_state_nor_the_tail():
    decoder().assert_padding_on_the_left_changes_nothing([12])  # rows begin within the first block and the second


def test_packed_documents_are_each_document_alone():
    decoder().assert_packed_documents_are_each_alone()


def test_three_delta_nets_and_an_attention_are_one_loop():
    module = tiny_decoder(layers=(*LAYERS[:1] * 3, LAYERS[1]) * 3)
    stored = [bank.layers for bank in stack_view(module).banks]
    assert stored == [tuple(f"layers_{place + 4 * turn}" for turn in range(3)) for place in range(4)]


def test_storage_changes_nothing():
    decoder().assert_storage_changes_nothing(scan_layers=False)


@pytest.mark.parametrize(
    "mesh, remat",
    [
        (MeshSpec(fsdp=2, tensor=2), None),
        # The backward pass computes all of it again, the shifts over sequence included.
        (MeshSpec(sequence=4, tensor=2), "full"),
        (MeshSpec(stage=2, tensor=2, microbatches=2), None),
    ],
    ids=str,
)
def test_a_mesh_trains_as_one_device(mesh, remat):
    decoder().assert_a_mesh_trains_as_one_device(mesh, remat=remat)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_keys": 3}, "num_heads a multiple of num_keys.* num_keys=3"),
        ({"key_dim": 0}, "positive sizes.* key_dim=0"),
        ({"activation": "tanh"}, "activation must be one of .* Received: activation='tanh'"),
        ({"norm_eps": 0.0}, "positive eps. Received: norm_eps=0.0"),
    ],
)
def test_specs_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DELTA, **fields)


def test_a_sequence_that_the_mesh_cannot_cut_is_refused():
    module, variables = decoder().module, decoder().variables
    with jax.set_mesh(build_mesh(MeshSpec(sequence=8))), pytest.raises(LayoutRefused, match="Received: length=16"):
        jax.eval_shape(module.apply, variables, TOKENS[:, :16])


def test_keys_that_a_tensor_axis_does_not_divide_are_refused_with_an_axis_that_does():
    module = decoder().module
    abstract = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    layout, mesh = Layout(min_shard=1), build_mesh(MeshSpec(tensor=8))
    why = r"4 heads of the scan \(keys of a delta net\) do not divide tensor=8"
    with pytest.raises(LayoutRefused, match=rf"(?s){why}.*Use MeshSpec\(fsdp=2, tensor=4\)"):
        layout.check(mesh, abstract, layout.shardings(mesh, abstract))
    # Where copies are allowed, every device computes all keys, and the explanation says how they would be split.
    whole = r"every device scans them all; a tensor axis that divides them splits the layer"
    assert re.search(rf"{why}: {whole}", layout.explain(mesh, abstract).summary())
    Layout(min_shard=1, tolerance=1.0).check(mesh, abstract, layout.shardings(mesh, abstract))
    with jax.set_mesh(mesh):
        decoder().assert_whole_sequences_are_the_slow_decoder()
