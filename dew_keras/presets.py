"""Checkpoints by name: what they say about themselves, and their weights when a mesh is known.

Entry points: `Preset`, `read_preset`. Nothing but the config and the tokenizer is read until `load`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import Mesh

from dew.data.text import Tokenizer
from dew.placement.layout import Layout
from dew.pretrained import PretrainedConfig, describe, load_variables


@dataclasses.dataclass(frozen=True)
class Preset:
    """A checkpoint that is described and not loaded.

    Attributes:
        described: Its config, tokenizer and the way to its weights.
        load_weights: Whether the model takes its weights; otherwise it starts from random ones.
    """

    described: PretrainedConfig
    load_weights: bool = True

    @property
    def name(self) -> str | None:
        """What the checkpoint calls its family; None where it does not say."""
        return str(self.described.config.get("model_type", "")) or None

    def load(self, module: Any, mesh: Mesh, layout: Layout, storage: str | None) -> dict[str, Any]:
        """Stream the weights from the file onto a mesh.

        Args:
            module: The described module, possibly with another precision or remat policy.
            mesh: Where to.
            layout: By which rules.
            storage: Dtype to keep the weights in; None keeps the file's.

        Returns:
            The variables.
        """
        return load_variables(self.described, mesh=mesh, layout=layout, module=module, param_dtype=storage)


def read_preset(
    source: Any,
    load_weights: bool = True,
    revision: str | None = None,
    tokenizer: Tokenizer | None = None,
    prediction_layers: bool = True,
    dropout: bool = True,
) -> Preset:
    """Read a checkpoint's config and tokenizer.

    Args:
        source: A directory, a `.gguf` file, `org/name[@revision]` or `hf://org/name[@revision]`.
        load_weights: Whether the model takes its weights.
        revision: Branch, tag or commit of a repository.
        tokenizer: Taken in place of the checkpoint's own; None takes that.
        prediction_layers: Whether the model takes layers that predict further tokens, where there are any.
        dropout: Whether training drops at the rates of the config; False sets them to 0.

    Raises:
        FileNotFoundError: If there is no such source.
        ValueError: If its config is not understood.
    """
    described = describe(source, revision=revision, prediction_layers=prediction_layers, dropout=dropout)
    if tokenizer is not None:
        described = dataclasses.replace(described, tokenizer=tokenizer)
    return Preset(described, load_weights)
