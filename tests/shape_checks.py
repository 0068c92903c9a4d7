"""Check array shapes against their annotations while the tests run (jaxtyping with beartype).

Only modules whose functions are called with real or traced arrays: a pytree of arrays is also rebuilt around shapes and
shardings, which no annotation of an array describes.
"""

import beartype
import jax
import jaxtyping
import numpy as np

import dew.arrays

MODULES = (
    "dew.kernels",
    "dew.parallel",
    "dew.nn.attention",
    "dew.nn.embed",
    "dew.nn.latent_attention",
    "dew.nn.linear",
    "dew.nn.masks",
    "dew.nn.mlp",
    "dew.nn.norm",
)
# An int is a float here, as for every type checker.
check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def install() -> None:
    """Check the modules from their next import on; a host array may stand wherever a device array may."""
    dew.arrays.Array = jax.Array | np.ndarray
    jaxtyping.install_import_hook(list(MODULES), f"{__name__}.check")
