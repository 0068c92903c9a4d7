"""Keras' ways to build a small model, over Flax modules in `dew_keras.Model`.

Entry points: `layers`, `models`, `substituted`, which puts them in the place of Keras' own while its tests are
imported. Only what the tests of Keras' callbacks touch is here.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import keras
import keras.src.saving
import numpy as np

import dew_keras

STATE = "state"


class Symbol:
    """What `Input` and a layer called on a symbol give: the input's shape and the layers behind it."""

    def __init__(self, shape: tuple[int, ...], chain: tuple[Layer, ...] = ()) -> None:
        self.shape, self.chain = tuple(shape), chain


class Handle:
    """A variable of a layer: the traced one while its module runs, the model's own elsewhere.

    Args:
        owner: The layer or model that made it.
        name: Its name in the owner.
        shape: Its shape.
        trainable: Whether it is a parameter.
        initializer: A Keras initializer.
    """

    def __init__(self, owner: Any, name: str, shape: tuple[int, ...], trainable: bool, initializer: Any) -> None:
        self.owner, self.name, self.shape, self.trainable = owner, name, tuple(shape), trainable
        self.initial = keras.initializers.get(initializer)
        self.traced: Any = None

    def bind(self, module: nn.Module) -> None:
        """Take the variable of a running module."""
        key = f"{self.owner.name}_{self.name}"
        if self.trainable:
            self.traced = module.param(key, lambda _: jnp.asarray(self.initial(self.shape, "float32")))
        else:
            self.traced = module.variable(STATE, key, lambda: jnp.asarray(self.initial(self.shape, "float32")))
        self.may_assign = not module.is_initializing() and module.is_mutable_collection(STATE)

    @property
    def value(self) -> Any:
        """The array."""
        if self.traced is not None:
            return self.traced if self.trainable else self.traced.value
        collection = "params" if self.trainable else STATE
        return np.asarray(self.owner.model.variables[collection][f"{self.owner.name}_{self.name}"])

    def assign(self, value: Any) -> None:
        """Replace it, inside a running module that trains."""
        if self.may_assign:
            self.traced.value = jnp.asarray(value, jnp.float32)

    def assign_add(self, value: Any) -> None:
        """Add to it, inside a running module that trains."""
        self.assign(self.value + value)

    def __add__(self, other: Any) -> Any:
        return self.value + other

    def __rmatmul__(self, other: Any) -> Any:
        return other @ self.value

    def __int__(self) -> int:
        return int(self.value)


class Variables:
    """What layers and models share: they make variables."""

    handles: list[Handle]

    def add_weight(
        self,
        shape: Any = (),
        initializer: Any = "glorot_uniform",
        dtype: Any = None,
        trainable: bool = True,
        name: str | None = None,
    ) -> Handle:
        """Make a variable."""
        del dtype
        handle = Handle(self, name or f"variable{len(self.handles)}", shape, trainable, initializer)
        self.handles.append(handle)
        return handle

    add_variable = add_weight


class Layer(Variables):
    """The base class of layers that a test writes itself."""

    def __init__(self, name: str | None = None, input_shape: Any = None, dtype: Any = None, **unknown: Any) -> None:
        if unknown:
            raise TypeError(f"{type(self).__name__} here takes no {sorted(unknown)}.")
        self.given_name, self.input_shape, self.handles = name, input_shape, []
        self.name = name or type(self).__name__.lower()
        self.model: Any = None
        self.is_made = False

    def __call__(self, symbol: Symbol) -> Symbol:
        """Go behind a symbol."""
        return Symbol(symbol.shape, (*symbol.chain, self))

    def build(self, input_shape: Any) -> None:
        """Make variables whose shape follows from the input."""

    def call(self, x: Any) -> Any:
        """Compute the outputs."""
        raise NotImplementedError

    def run(self, module: nn.Module, x: Any) -> Any:
        """Compute the outputs inside a running module."""
        if not self.is_made:
            self.build(x.shape)
            self.is_made = True
        return run_call(self, module, x)


def run_call(owner: Any, module: nn.Module, x: Any) -> Any:
    """Call `owner.call` with its variables bound to a running module."""
    for handle in owner.handles:
        handle.bind(module)
    try:
        return owner.call(x)
    finally:
        for handle in owner.handles:
            handle.traced = None


class Dense(Layer):
    """`keras.layers.Dense`."""

    def __init__(
        self, units: int, activation: Any = None, use_bias: bool = True, kernel_initializer: Any = None, **rest: Any
    ) -> None:
        super().__init__(**rest)
        self.units, self.activation, self.use_bias = units, keras.activations.get(activation), use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer or "glorot_uniform")
        names = (activation or "linear", kernel_initializer or "glorot_uniform")
        self._words = names if all(isinstance(name, str) for name in names) else None

    @property
    def spec(self) -> tuple[str, int, str, bool, str] | None:
        """The layer in plain values, or None when it was given objects."""
        if self._words is None:
            return None
        return self.name, self.units, self._words[0], self.use_bias, self._words[1]

    def run(self, module: nn.Module, x: Any) -> Any:
        """Compute the outputs inside a running module."""
        kernel_init: Any = nn.initializers.glorot_uniform()
        if not isinstance(self.kernel_initializer, keras.initializers.GlorotUniform):
            kernel_init = lambda key, shape, dtype: jnp.asarray(self.kernel_initializer(shape, dtype))  # noqa: E731
        dense = nn.Dense(self.units, use_bias=self.use_bias, kernel_init=kernel_init, name=self.name)
        return self.activation(dense(x))


class DenseStack(nn.Module):
    """Dense layers one behind the other, described by plain values, so that a `.keras` file can hold it."""

    specs: tuple[tuple[str, int, str, bool, str], ...]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Apply them."""
        for name, units, activation, use_bias, initializer in self.specs:
            layer = Dense(units, activation, use_bias, initializer)
            layer.name = name
            x = layer.run(self, x)
        return x


def module_of(layers: tuple[Any, ...]) -> nn.Module:
    """Build the module of some layers.

    Args:
        layers: The layers in order; a model with a `call` of its own stands for itself.
    """
    specs = tuple(layer.spec for layer in layers if isinstance(layer, Dense) and layer.spec is not None)
    return DenseStack(specs) if layers and len(specs) == len(layers) else Chain(layers)


class Chain(nn.Module):
    """Layers one behind the other."""

    layers: tuple[Any, ...]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Apply them."""
        for layer in self.layers:
            x = layer.run(self, x)
        return x


class Model(dew_keras.Model, Variables):
    """`keras.Model`: of symbols, or a subclass with `call`."""

    def __init__(self, inputs: Any = None, outputs: Any = None, name: str | None = None, **loaded: Any) -> None:
        self.handles: list[Handle] = []
        if isinstance(inputs, nn.Module):  # as load_model builds it
            self._layers, self._input_shape = (), None
            super().__init__(inputs, outputs, name=name, **loaded)
        elif inputs is None:
            self._start((self,), None, name)
        else:
            self._start(outputs.chain, inputs.shape, name)

    def _start(self, layers: tuple[Any, ...], shape: tuple[int, ...] | None, name: str | None) -> None:
        self._layers, self._input_shape = layers, shape
        taken: dict[str, int] = {}
        for layer in layers:
            if layer is not self:
                base = layer.given_name or type(layer).__name__.lower()
                number = taken.setdefault(base, 0)
                taken[base] += 1
                layer.name = base if number == 0 else f"{base}_{number}"
            layer.model = self
        super().__init__(module_of(layers), name=name or type(self).__name__.lower())

    @property
    def layers(self) -> list[Any]:
        """The layers."""
        return [layer for layer in self._layers if layer is not self]

    def run(self, module: nn.Module, x: Any) -> Any:
        """Compute the outputs of a subclass inside a running module."""
        return run_call(self, module, x)

    def compile(self, *positional: Any, **keywords: Any) -> None:
        """Compile, and build where the input's shape is known, as Keras has built it then."""
        super().compile(*positional, **keywords)
        if self._input_shape is not None and not self.built:
            self.build(np.zeros((1, *self._input_shape), np.float32))


class Sequential(Model):
    """`keras.Sequential`."""

    def __init__(self, layers: Any = (), tokenizer: Any = None, name: str | None = None, **loaded: Any) -> None:
        self.handles: list[Handle] = []
        if isinstance(layers, nn.Module):
            super().__init__(layers, tokenizer, name, **loaded)
            return
        shape = next((item.shape for item in layers if isinstance(item, Symbol)), None)
        made = tuple(item for item in layers if not isinstance(item, Symbol))
        if shape is None and made:
            shape = made[0].input_shape
        self._start(made, shape, name)

    def add(self, layer: Any) -> None:
        """Append a layer, before the model is compiled."""
        self.__init__((*self._layers, layer), name=self.name)  # type: ignore[misc]


def make_input(shape: Any, batch_size: int | None = None, name: str | None = None, dtype: Any = None) -> Symbol:
    """Stand for `keras.Input`; only the shape matters."""
    del batch_size, name, dtype
    return Symbol(shape)


def load_model(path: Any) -> Any:
    """Read a `.keras` file of a model of Dense layers."""
    return dew_keras.load_model(path, {"Model": Model, "Sequential": Sequential, "DenseStack": DenseStack})


layers = types.SimpleNamespace(Dense=Dense, Input=make_input, Layer=Layer)
models = types.SimpleNamespace(Model=Model, Sequential=Sequential)
saving = types.SimpleNamespace(load_model=load_model)


@contextlib.contextmanager
def substituted() -> Iterator[None]:
    """Let `from keras.src import layers, models, saving` and `keras.src.models.Sequential` mean those here."""
    package = sys.modules["keras.src"]
    of_models, of_sequential = sys.modules["keras.src.models"], sys.modules["keras.src.models.sequential"]
    places = [
        (package, "layers", layers),
        (package, "models", models),
        (package, "saving", saving),
        (of_models, "Sequential", Sequential),
        (of_models, "Model", Model),
        (of_sequential, "Sequential", Sequential),
    ]
    before = [getattr(place, name) for place, name, _ in places]
    for place, name, value in places:
        setattr(place, name, value)
    try:
        yield
    finally:
        for (place, name, _), value in zip(places, before, strict=True):
            setattr(place, name, value)
