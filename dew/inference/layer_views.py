"""Per-layer views of banked weights on one CPU device, for decoding without copying them.

Entry points: `decodes_layer_by_layer`, `layer_views`. XLA on CPU copies a layer's slice out of its bank before it
multiplies, for every token; accelerators read the slice in place. SmolLM2-135M decodes a tenth faster with views.
"""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dew.placement.stacks import StackView

ALIGNMENT_BYTES = 64
"""JAX shares memory with a NumPy array that starts at a multiple of it, and copies any other."""
MOST_LAYERS = 64
"""Layers are unrolled; beyond this many the compilation costs more than the copies."""


def decodes_layer_by_layer(module: Any, variables: Any, stacks: StackView, mesh: Mesh) -> bool:
    """Say whether decoding gets views of single layers: on one CPU device, when no view needs a copy.

    Args:
        module: The model.
        variables: Its variables, placed.
        stacks: How its banks stand for layers.
        mesh: Where the variables are.
    """
    layers = getattr(module, "layers", ())
    if mesh.size != 1 or mesh.devices.item().platform != "cpu" or not stacks.banks or len(layers) > MOST_LAYERS:
        return False
    banked = [variables["params"][bank.name] for bank in stacks.banks]
    return all(
        leaf.unsafe_buffer_pointer() % ALIGNMENT_BYTES == 0 and leaf.nbytes // leaf.shape[0] % ALIGNMENT_BYTES == 0
        for leaf in jax.tree.leaves(banked)
    )


def layer_views(variables: Any, stacks: StackView) -> Any:
    """Lay banked variables out per layer without copying them.

    Args:
        variables: Variables on one CPU device. They must outlive every use of the views, which hold no reference.
        stacks: How banks stand for layers.

    Returns:
        The tree with one subtree per layer, arrays that share the variables' memory.
    """
    jax.block_until_ready(variables)
    device = next(iter(jax.tree.leaves(variables)[0].devices()))
    return jax.device_put(stacks.unstack(jax.tree.map(_host_view, variables)), device)


def _host_view(array: jax.Array) -> np.ndarray:
    """View an array's memory from the host.

    By address, since `np.asarray` and DLPack register a reader: a training step that is to reuse the memory of its
    weights would then copy them, and NumPy's DLPack has no bfloat16.
    """
    memory = (ctypes.c_char * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(memoryview(memory), dtype=array.dtype).reshape(array.shape)
