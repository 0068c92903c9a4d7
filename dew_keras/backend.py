"""Keras on JAX: chosen when nobody chose, refused with advice when somebody chose otherwise.

Entry point: `require_jax_backend`, which the package calls before it imports Keras.
"""

from __future__ import annotations

import os
import sys

ADVICE = "Set KERAS_BACKEND=jax before Python starts, or leave it unset and import dew_keras before keras."


def require_jax_backend() -> None:
    """Set KERAS_BACKEND=jax when it is unset and Keras is not loaded yet.

    Raises:
        ImportError: If Keras is loaded, or about to be loaded, with another backend.
    """
    if "keras" not in sys.modules:
        chosen = os.environ.setdefault("KERAS_BACKEND", "jax")
        if chosen != "jax":
            raise ImportError(f"dew_keras needs Keras on JAX. {ADVICE} Received: KERAS_BACKEND={chosen}")
    import keras

    loaded = keras.backend.backend()
    if loaded != "jax":
        raise ImportError(f"dew_keras needs Keras on JAX; it is loaded with {loaded!r} already. {ADVICE}")
