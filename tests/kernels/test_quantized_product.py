"""8-bit products: what they round, that gradients pass, and that a decoder uses them on any mesh."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dew.kernels.quantized_product import product, quantized
from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.tiny import tiny_batch, tiny_decoder

KINDS = ["int8", "fp8"]


def operands(seed: int = 0):
    generator = np.random.default_rng(seed)
    x = generator.normal(0, 1, (3, 5, 4, 6)).astype(np.float32) * generator.uniform(0.01, 10, (3, 5, 1, 1))
    return jnp.asarray(x, jnp.float32), jnp.asarray(generator.normal(0, 1, (4, 6, 7, 2)), jnp.float32)


def rounding(x, summed, kind):
    """Bound what rounding changes: half a step of the row's scale in int8, half a unit of 3 bits in E4M3."""
    scale = np.abs(x).max(summed, keepdims=True) / {"int8": 127, "fp8": 448}[kind]
    steps = np.broadcast_to(scale / 2, x.shape) if kind == "int8" else np.maximum(np.abs(x) / 16, scale / 2**10)
    return steps * 1.001


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_off_by_the_rounding_of_its_own_rows_and_outputs(kind):
    x, kernel = (np.asarray(each) for each in operands())
    with quantized(kind):
        ours = np.asarray(product(x, kernel, 2))
    by_x, by_kernel = rounding(x, (2, 3), kind), rounding(kernel, (0, 1), kind)
    bound = np.tensordot(by_x, np.abs(kernel) + by_kernel, 2) + np.tensordot(np.abs(x), by_kernel, 2)
    off = np.abs(ours - np.tensordot(x, kernel, 2))
    assert (off <= bound).all()
    assert off.max() > 1e-3 * np.abs(ours).max(), "nothing was rounded"


@pytest.mark.parametrize("kind, name", [("int8", "xi8>"), ("fp8", "xf8E4M3FN>")])
def test_the_program_multiplies_8_bit_numbers(kind, name):
    with quantized(kind):
        text = jax.jit(lambda x, kernel: product(x, kernel, 2)).lower(*operands()).as_text()
    (line,) = [line for line in text.splitlines() if "dot_general" in line]
    assert line.count(name) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_exact_product(kind):
    x, kernel = operands()
    cotangent = jnp.asarray(np.random.default_rng(1).normal(0, 1, (3, 5, 7, 2)), jnp.float32)
    with quantized(kind):
        ours = jax.vjp(lambda x, kernel: product(x, kernel, 2), x, kernel)[1](cotangent)
    exact = jax.vjp(lambda x, kernel: product(x, kernel, 2), x, kernel)[1](cotangent)
    jax.tree.map(np.testing.assert_array_equal, ours, exact)


def test_what_cannot_be_computed_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"quantization must be 'int8', 'fp8' or None\. Received: quantization='int4'"):
        tiny_decoder(quantization="int4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'dew\[quantization\]'"):
        tiny_decoder(quantization="int8")


def alone():
    return build_mesh(MeshSpec(), jax.devices()[:1])


@functools.cache
def drawn():
    """Draw the weights, which are the same for every kind of product and on every mesh."""
    return jax.device_get(Trainer(LanguageModel(tiny_decoder(num_layers=2)), "sgd", mesh=alone()).place().variables)


@functools.cache
def step_of(quantization, mesh=None, **fields):
    """Train one step, on one device without a mesh: loss and gradients of a decoder of two layers."""
    module = tiny_decoder(num_layers=2, quantization=quantization, **fields)
    layout = Layout(min_shard=1, tolerance=1.0)  # two heads of keys leave attention whole on tensor=4
    trainer = Trainer(LanguageModel(module), optax.sgd(1.0), mesh=mesh or alone(), layout=layout)
    loop = trainer.loop(trainer.place(drawn()))
    before = named_leaves(jax.device_get(loop.state.params))
    loss = loop.step(tiny_batch()).read()["loss"].value()
    after = named_leaves(jax.device_get(loop.state.params))
    return float(loss), {name: before[name] - after[name] for name in before}


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_trains_with_them_alike_on_one_device_and_on_a_mesh(kind):
    exact, exact_gradients = step_of(None)
    loss, gradients = step_of(kind)
    assert loss != exact
    assert loss == pytest.approx(exact, rel=5e-3)
    spread, spread_gradients = step_of(kind, MeshSpec(fsdp=2, tensor=2), remat="full")
    # A number between two roundings may fall to either side where a sum was taken in another order.
    assert spread == pytest.approx(loss, rel=1e-4)
    for name, gradient in gradients.items():
        assert cosine(gradient, exact_gradients[name]) > 0.98, name
        assert cosine(gradient, spread_gradients[name]) > 0.999, name


def cosine(a, b):
    return float(np.sum(a * b) / np.sqrt(np.sum(a * a) * np.sum(b * b)))
