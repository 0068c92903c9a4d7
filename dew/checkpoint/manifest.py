"""What a checkpoint says about itself: its leaves by per-layer name, how they are stored, where the data is.

Entry points: `Manifest`, `compare`. It is one JSON file beside the arrays, written last.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from dew.placement.stacks import Bank, StackView

FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of one checkpoint.

    Attributes:
        leaves: Per-layer path of every leaf to [shape, dtype name].
        stacks: How layers were stored together when it was saved.
        facts: What else the owner of the state wants to know before reading it; JSON.
        position: Position of the data, JSON or bytes; None when there was none.
    """

    leaves: Mapping[str, tuple[tuple[int, ...], str]]
    stacks: StackView
    facts: Mapping[str, Any]
    position: Any

    @classmethod
    def of(cls, tree: Any, stacks: StackView, facts: Mapping[str, Any], position: Any) -> Manifest:
        """Describe a tree that is about to be saved.

        Args:
            tree: Nested mappings of arrays or shapes, layers stored as `stacks` says.
            stacks: How layers are stored.
            facts: See the class.
            position: See the class.
        """
        shapes = stacks.logical_shapes(tree)
        leaves = {path: (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in shapes.items()}
        return cls(leaves=leaves, stacks=stacks, facts=dict(facts), position=position)

    def branch(self, part: str) -> Manifest:
        """Describe one branch of the tree alone.

        Args:
            part: Its path; the leaves are named from there.
        """
        prefix = f"{part}/"
        leaves = {path.removeprefix(prefix): leaf for path, leaf in self.leaves.items() if path.startswith(prefix)}
        return dataclasses.replace(self, leaves=leaves)

    def to_json(self) -> dict[str, Any]:
        """Write the manifest as JSON values."""
        position = self.position
        if isinstance(position, bytes):
            position = {"bytes": base64.b64encode(position).decode("ascii")}
        else:
            position = {"json": position}
        return {
            "format": FORMAT,
            "leaves": {path: [list(shape), dtype] for path, (shape, dtype) in self.leaves.items()},
            "banks": {bank.name: list(bank.layers) for bank in self.stacks.banks},
            "facts": dict(self.facts),
            "position": position,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Manifest:
        """Read what `to_json` wrote.

        Args:
            values: JSON values.

        Raises:
            ValueError: If another format wrote it.
        """
        if values.get("format") != FORMAT:
            raise ValueError(
                f"This checkpoint has format {values.get('format')!r}; this version reads format {FORMAT}. "
                "Read it with the version that wrote it."
            )
        position = values["position"]
        decoded = base64.b64decode(position["bytes"]) if "bytes" in position else position["json"]
        banks = tuple(Bank(name, tuple(layers)) for name, layers in values["banks"].items())
        leaves = {path: (tuple(shape), dtype) for path, (shape, dtype) in values["leaves"].items()}
        return cls(leaves=leaves, stacks=StackView(banks), facts=values["facts"], position=decoded)


def compare(stored: Manifest, template: Any, stacks: StackView) -> None:
    """Refuse to read a checkpoint into a tree of another structure.

    Args:
        stored: The checkpoint's manifest.
        template: Nested mappings of shapes that the caller wants, layers stored as `stacks` says.
        stacks: How the caller stores layers.

    Raises:
        ValueError: If a leaf is missing, unknown or has another shape or dtype, naming the first ones.
    """
    wanted = {path: (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in stacks.logical_shapes(template).items()}
    missing = [path for path in wanted if path not in stored.leaves]
    unknown = [path for path in stored.leaves if path not in wanted]
    if missing or unknown:
        raise ValueError(
            "The checkpoint was saved by another model or optimizer. "
            f"It lacks {missing[:5]} and holds {unknown[:5]}, which this run does not have. "
            "Build the same model and optimizer, or use another directory."
        )
    changed = [
        f"{path}: saved {stored.leaves[path]}, wanted {leaf}"
        for path, leaf in wanted.items()
        if stored.leaves[path] != leaf
    ]
    if changed:
        raise ValueError(
            f"The checkpoint holds leaves of other shapes or dtypes: {'; '.join(changed[:5])}. "
            "Build the same model and optimizer, or use another directory."
        )


def shapes_on(tree: Any, shardings: Any) -> Any:
    """Write a tree of shapes with the place of every leaf.

    Args:
        tree: Arrays or shapes.
        shardings: Shardings in the same structure.

    Returns:
        ShapeDtypeStructs that carry their sharding.
    """
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree, shardings
    )
