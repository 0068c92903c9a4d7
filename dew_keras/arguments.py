"""What verbs check before anything changes: numbers of epochs, verbosity, parts of the rows, callbacks.

Entry points: `check_fit`, `check_hooks`, `flat_callbacks`; `limited_epochs` and `limited_steps` for what keras.config
caps.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import keras
import numpy as np


def check_fit(*, epochs: Any, initial_epoch: Any, validation_split: Any, validation_freq: Any, shuffle: Any) -> None:
    """Refuse numbers that `fit` cannot train by.

    Args:
        epochs: Number of the last epoch.
        initial_epoch: Number of the first epoch, from 0.
        validation_split: Part of the rows to validate on.
        validation_freq: Every how many epochs to validate, or after which.
        shuffle: Whether to shuffle.

    Raises:
        ValueError: If one is not what it must be.
    """
    for name, value in (("epochs", epochs), ("initial_epoch", initial_epoch)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
            raise ValueError(f"{name} must be 0 or a positive integer. Received: {name}={value!r}")
    if not isinstance(shuffle, bool | np.bool_ | int):
        raise ValueError(
            f"shuffle must be True, which shuffles all rows every epoch, or False. Received: shuffle={shuffle!r}"
        )
    is_part = isinstance(validation_split, int | float | np.number) and not isinstance(validation_split, bool)
    if validation_split is not None and not (is_part and 0 <= validation_split < 1):
        raise ValueError(
            f"validation_split must be at least 0 and below 1. Received: validation_split={validation_split!r}"
        )
    is_number = isinstance(validation_freq, int) and not isinstance(validation_freq, bool) and validation_freq >= 1
    if not is_number and not isinstance(validation_freq, list | set):
        raise ValueError(
            "`validation_freq` must be a positive integer or a list of epochs, counted from 1. "
            f"Received: validation_freq={validation_freq!r}"
        )


def limited_epochs(epochs: int) -> int:
    """Return the number of the last epoch under `keras.config.set_max_epochs`, with a warning where that is lower.

    Args:
        epochs: What `fit` was given.
    """
    most = keras.config.max_epochs()
    if not most or most >= epochs:
        return epochs
    warnings.warn(f"Limiting epochs to {most}, as keras.config.set_max_epochs says.", stacklevel=3)
    return most


def limited_steps(given: int | None, known: int | None) -> int | None:
    """Return the batches of a pass under `keras.config.set_max_steps_per_epoch`, with a warning where that is lower.

    Args:
        given: What the verb was given; None for all of the data.
        known: Batches of the data, or None when nobody knows.
    """
    most, asked = keras.config.max_steps_per_epoch(), known if given is None else given
    if not most or (asked is not None and most >= asked):
        return given
    warnings.warn(f"Limiting steps_per_epoch to {most}, as keras.config.set_max_steps_per_epoch says.", stacklevel=3)
    return most


def check_hooks(verbose: Any, callbacks: Any) -> None:
    """Refuse a verbosity that means nothing, and callbacks that are none.

    Args:
        verbose: 0, 1, 2 or "auto"; a higher number prints the epochs' headers only, as in Keras.
        callbacks: As `fit` takes them.

    Raises:
        ValueError: If the verbosity is none of these.
        TypeError: If a callback is none.
    """
    is_level = isinstance(verbose, int | np.integer) and verbose >= 0
    if not is_level and not (isinstance(verbose, str) and verbose == "auto"):
        raise ValueError(f"verbose must be 0, 1, 2 or 'auto'. Received: verbose={verbose!r}")
    flat_callbacks(callbacks)


def flat_callbacks(callbacks: Any) -> list[Any]:
    """List callbacks that may be nested.

    Args:
        callbacks: Keras callbacks, possibly in nested lists, a `keras.callbacks.CallbackList`, or None.

    Raises:
        TypeError: If one is no callback.
        ImportError: If one needs TensorFlow, and it is not installed.
    """
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    if isinstance(callbacks, list | tuple):
        return [found for item in callbacks for found in flat_callbacks(item)]
    if isinstance(callbacks, type) or not callable(getattr(callbacks, "set_model", None)):
        raise TypeError(
            "callbacks must be keras.callbacks.Callback objects, made as in EarlyStopping(), possibly in lists. "
            f"Received: {callbacks!r} of type {type(callbacks).__name__}"
        )
    if isinstance(callbacks, keras.callbacks.TensorBoard) and importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "keras.callbacks.TensorBoard writes through TensorFlow, which is not installed. Use "
            f"dew_keras.TensorBoard(log_dir={callbacks.log_dir!r}), which writes scalars without it."
        )
    return [callbacks]
