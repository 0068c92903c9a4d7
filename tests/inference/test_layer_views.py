"""Views of single layers are the bank's own memory, and leave the bank free to be reused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dew.inference.layer_views import decodes_layer_by_layer, layer_views
from dew.placement import MeshSpec, StackView, build_mesh
from tests.tiny import tiny_decoder


def one_device():
    return build_mesh(MeshSpec(), jax.devices()[:1])


def banked(dtype="float32"):
    module = tiny_decoder(param_dtype=dtype)
    variables = nn.meta.unbox(jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))
    return module, variables


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_views_share_the_memory_of_the_bank(dtype):
    module, variables = banked(dtype)
    views = layer_views(variables, module.stack_view())
    bank = variables["params"]["layers_0_3"]["mlp"]["gate_proj"]["kernel"]
    for layer in range(4):
        view = views["params"][f"layers_{layer}"]["mlp"]["gate_proj"]["kernel"]
        assert view.unsafe_buffer_pointer() - bank.unsafe_buffer_pointer() == layer * bank.nbytes // 4
        np.testing.assert_array_equal(view, bank[layer])
    split = module.clone(scan_layers=False)
    tokens = jnp.arange(8)[None]
    np.testing.assert_allclose(split.apply(views, tokens), module.apply(variables, tokens), rtol=1e-5, atol=1e-5)


def test_a_bank_that_had_views_is_still_donated_in_place():
    module, variables = banked()
    views = layer_views(variables, module.stack_view())
    jax.block_until_ready(views)
    del views
    bank = variables["params"]["layers_0_3"]["mlp"]["gate_proj"]["kernel"]
    address = bank.unsafe_buffer_pointer()
    assert jax.jit(lambda x: x + 1, donate_argnums=0)(bank).unsafe_buffer_pointer() == address


def test_views_are_for_banks_on_one_cpu_device():
    module, variables = banked()
    stacks = module.stack_view()
    assert decodes_layer_by_layer(module, variables, stacks, one_device())
    assert not decodes_layer_by_layer(module, variables, stacks, build_mesh(MeshSpec()))
    assert not decodes_layer_by_layer(module, variables, StackView(), one_device())
    # A layer's 33 bytes start in the middle of a cache line, where JAX would copy.
    odd = {"params": {"layers_0_3": {"scale": jnp.zeros((4, 33), jnp.int8)}}}
    assert not decodes_layer_by_layer(module, odd, stacks, one_device())
