"""Flax modules as JSON data, and back without running anything that the data names.

Entry points: `module_config`, `module_from_config`. Only classes of dew and Flax, a checked list of functions, and
what the caller passes as custom objects are built.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from flax import linen as nn

INITIALIZERS = (
    *("variance_scaling", "normal", "truncated_normal", "uniform"),
    *("constant", "orthogonal", "delta_orthogonal"),
)
_ACTIVATIONS = (
    *("celu", "elu", "gelu", "glu", "hard_sigmoid", "hard_silu", "hard_swish", "hard_tanh", "identity", "leaky_relu"),
    *("log_sigmoid", "log_softmax", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "soft_sign", "softmax"),
    *("softplus", "squareplus", "standardize", "swish", "tanh"),
)
_ARRAY_FUNCTIONS = ("abs", "cos", "exp", "max", "mean", "min", "sin", "square", "sum", "tanh")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"jax.nn.{name}": getattr(jax.nn, name) for name in _ACTIVATIONS if hasattr(jax.nn, name)},
    **{f"jax.numpy.{name}": getattr(jnp, name) for name in _ARRAY_FUNCTIONS},
    "jax.nn.initializers.zeros": nn.initializers.zeros,
    "jax.nn.initializers.ones": nn.initializers.ones,
    "flax.linen.dot_product_attention": nn.dot_product_attention,
    "flax.linen.avg_pool": nn.avg_pool,
    "flax.linen.max_pool": nn.max_pool,
}
# What a module owns that is no description of it.
_RUNTIME_FIELDS = ("parent", "scope")


def module_config(module: Any) -> Any:
    """Describe a module as JSON values.

    Args:
        module: A Flax module whose fields are numbers, texts, dtypes, tuples, lists and dicts, specs of dew, other
            modules, classes, and functions that have a name.

    Raises:
        ValueError: If a field cannot be described, naming it.
    """
    return _described(module, type(module).__name__)


def module_from_config(config: Any, custom_objects: Mapping[str, Any] | None, *, safe_mode: bool) -> Any:
    """Build the module that `module_config` described.

    Args:
        config: What it returned.
        custom_objects: Classes and functions by name.
        safe_mode: Whether to refuse to import what is neither dew's nor Flax's and no custom object.

    Raises:
        ValueError: If the description names what may not be built, or is no description.
    """
    module = _Builder(dict(custom_objects or {}), safe_mode).build(config)
    if not isinstance(module, nn.Module):
        raise ValueError(f"The file describes no Flax module. Received: {type(module).__name__}")
    return module


def _described(value: Any, where: str) -> Any:
    """Describe one value; every JSON object has one key, which says what it is."""
    if value is None or isinstance(value, bool | int | str | float):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [_described(item, where) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_described(item, where) for item in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _described(item, f"{where}[{key!r}]") for key, item in value.items()}}
    if isinstance(value, nn.Module) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return {"object": _name_of(type(value)), "fields": _fields(value, where)}
    if isinstance(value, jax.lax.Precision):
        return {"precision": value.name}
    if isinstance(value, functools.partial):
        parts = (value.func, list(value.args), dict(value.keywords))
        return {"partial": [_described(part, where) for part in parts]}
    if (dtype := _dtype_name(value)) is not None:
        return {"dtype": dtype}
    if callable(value):
        return _described_callable(value, where)
    raise ValueError(
        f"{where} cannot be saved: a value of type {type(value).__name__} has no description. Use numbers, texts, "
        f"tuples, dtypes, modules or named functions, or save_weights(). Received: {value!r}"
    )


def _fields(value: Any, where: str) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name, None)
        if not field.init or field.name in _RUNTIME_FIELDS or item is field.default:
            continue
        found[field.name] = _described(item, f"{where}.{field.name}")
    return found


def _described_callable(value: Any, where: str) -> Any:
    name = next((name for name, function in FUNCTIONS.items() if function is value), None)
    if name is not None:
        return {"function": name}
    if isinstance(value, type):
        return {"class": _name_of(value)}
    initializer = _described_initializer(value)
    if initializer is not None:
        return {"initializer": initializer}
    qualified = getattr(value, "__qualname__", "<unnamed>")
    if "<" in qualified:
        raise ValueError(
            f"{where} cannot be saved: {qualified!r} has no name to find it by. Use a function that is defined at the "
            "top of a module and pass it to load_model(custom_objects=...), or save_weights()."
        )
    return {"function": f"{value.__module__}.{qualified}"}


def _described_initializer(value: Any) -> Any:
    """Read the arguments of an initializer out of its closure, checked by making it again."""
    name = getattr(value, "__qualname__", "").split(".")[0]
    if name not in INITIALIZERS or not inspect.isfunction(value):
        return None
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    arguments = {free: cell.cell_contents for free, cell in cells}
    again = getattr(jax.nn.initializers, name)(**arguments)
    if again.__code__ is not value.__code__ or again.__defaults__ != value.__defaults__:
        return None
    return {"name": name, "arguments": {key: _described(item, name) for key, item in arguments.items()}}


def _dtype_name(value: Any) -> str | None:
    is_dtype = isinstance(value, np.dtype) or hasattr(value, "dtype")
    if not is_dtype and not (isinstance(value, type) and issubclass(value, np.generic)):
        return None
    try:
        return jnp.dtype(value).name
    except TypeError:
        return None


def _name_of(kind: type) -> str:
    if getattr(nn, kind.__name__, None) is kind:
        return f"flax.linen.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def custom_object(name: str, custom_objects: Mapping[str, Any] | None) -> Any:
    """Find what a caller gave or registered with Keras under the last part of a name, or None.

    Args:
        name: Import path.
        custom_objects: What the caller gave, by name.
    """
    short = name.rpartition(".")[2]
    # Keras registers under "package>name".
    registered = (key for key in keras.saving.get_custom_objects() if key.rpartition(">")[2] == short)
    return keras.saving.get_registered_object(next(registered, short), custom_objects=dict(custom_objects or {}))


@dataclasses.dataclass(frozen=True)
class _Builder:
    known: Mapping[str, Any]
    safe_mode: bool

    def build(self, value: Any) -> Any:
        """Build one described value."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return [self.build(item) for item in value]
        kinds: dict[str, Callable[[Any], Any]] = {
            "tuple": lambda items: tuple(self.build(item) for item in items),
            "dict": lambda items: {key: self.build(item) for key, item in items.items()},
            "dtype": jnp.dtype,
            "precision": lambda name: jax.lax.Precision[name],
            "class": self._class,
            "function": self._function,
            "initializer": self._initializer,
            "partial": self._partial,
        }
        if isinstance(value, dict) and set(value) == {"object", "fields"}:
            fields = {key: self.build(item) for key, item in value["fields"].items()}
            return self._class(value["object"])(**fields)
        if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in kinds:
            raise ValueError(f"The file describes a value in a form that is not known: {str(value)[:100]}")
        ((kind, content),) = value.items()
        return kinds[kind](content)

    def _class(self, name: str) -> Any:
        custom = self._custom(name)
        if custom is not None:
            return custom
        module, _, kind = name.rpartition(".")
        if module == "flax.linen":
            found = getattr(nn, kind, None)
        elif module.startswith("dew.") or not self.safe_mode:
            found = _imported(module, kind)
        else:
            raise self._refused("class", name)
        is_spec = dataclasses.is_dataclass(found) and module.startswith("dew.nn.")
        is_module = isinstance(found, type) and issubclass(found, nn.Module)
        if self.safe_mode and not (found is not None and (is_module or is_spec) and _name_of(found) == name):
            raise ValueError(f"The file names {name!r}, which is no module class.")
        return found

    def _function(self, name: str) -> Any:
        if name in FUNCTIONS:
            return FUNCTIONS[name]
        custom = self._custom(name)
        if custom is not None:
            return custom
        if self.safe_mode:
            raise self._refused("function", name)
        return _imported(*name.rpartition(".")[::2])

    def _initializer(self, content: Any) -> Any:
        if content["name"] not in INITIALIZERS:
            raise self._refused("initializer", content["name"])
        arguments = {key: self.build(item) for key, item in content["arguments"].items()}
        return getattr(jax.nn.initializers, content["name"])(**arguments)

    def _partial(self, content: Any) -> Any:
        function, arguments, keywords = (self.build(part) for part in content)
        return functools.partial(function, *arguments, **keywords)

    def _custom(self, name: str) -> Any:
        if name in self.known or name.startswith(("flax.linen.", "dew.")):
            return self.known.get(name)
        return custom_object(name, self.known)

    def _refused(self, kind: str, name: str) -> ValueError:
        short = name.rpartition(".")[2]
        return ValueError(
            f"The file needs the {kind} {name!r}, which safe_mode=True does not import. Pass "
            f"custom_objects={{{short!r}: {short}}}; safe_mode=False imports it by the name in the file, which runs "
            "its code, so use it only for files that you trust."
        )


def _imported(module: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"The file names '{module}.{name}', which is not there: {error}. Pass it in custom_objects."
        ) from error
    return found
