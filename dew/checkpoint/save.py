"""A run's checkpoint directory: numbered steps, written in the background, the newest few kept.

Entry point: `Checkpoints`, over Orbax. A step appears under its number only once all of it is
written; a killed save leaves the steps before it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from dew.checkpoint.manifest import Manifest
from dew.checkpoint.restore import read_tree
from dew.placement.stacks import StackView
from dew.tree import named_leaves, nested


class Checkpoints:
    """Save and restore trees of arrays by step.

    Nothing is opened or made until the first use.

    Args:
        directory: Where the steps live; made at the first save.
        keep: How many of the newest steps to keep.

    Raises:
        ValueError: If `keep` is not positive.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep must be at least 1. Received: keep={keep}.")
        self.directory = Path(directory).absolute()
        self.keep = keep

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=self.keep, create=True, enable_async_checkpointing=True)
        handlers = {"state": ocp.StandardCheckpointHandler(), "manifest": ocp.JsonCheckpointHandler()}
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        registry.add("state", ocp.args.StandardSave, handlers["state"])
        registry.add("state", ocp.args.StandardRestore, handlers["state"])
        registry.add("manifest", ocp.args.JsonSave, handlers["manifest"])
        registry.add("manifest", ocp.args.JsonRestore, handlers["manifest"])
        return ocp.CheckpointManager(self.directory, options=options, handler_registry=registry)

    def steps(self) -> tuple[int, ...]:
        """List the steps that are completely written, oldest first."""
        return tuple(sorted(self._manager.all_steps())) if self.directory.is_dir() else ()

    def latest(self) -> int | None:
        """Return the newest complete step, or None."""
        steps = self.steps()
        return steps[-1] if steps else None

    def save(
        self, step: int, tree: Any, *, stacks: StackView = StackView(), facts: Mapping[str, Any], position: Any = None
    ) -> None:
        """Start saving a tree; the arrays may be changed as soon as this returns.

        Args:
            step: Number of the step; one that exists already is kept as it is.
            tree: Any tree of arrays.
            stacks: How the tree stores layers.
            facts: JSON values to be read back before the arrays.
            position: Position of the data, JSON or bytes.
        """
        if step in self.steps():
            return
        arrays = nested(named_leaves(tree))
        manifest = Manifest.of(arrays, stacks, facts, position)
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), manifest=ocp.args.JsonSave(manifest.to_json()))
        self._manager.save(step, args=items, force=True)

    def manifest(self, step: int | None = None) -> Manifest:
        """Read what a checkpoint says about itself.

        Args:
            step: Which step; None is the newest.

        Raises:
            FileNotFoundError: If there is no such step.
        """
        step = self._existing(step)
        values = self._manager.restore(step, args=ocp.args.Composite(manifest=ocp.args.JsonRestore()))
        return Manifest.from_json(values["manifest"])

    def restore(
        self, template: Any, *, stacks: StackView = StackView(), step: int | None = None, part: str | None = None
    ) -> Any:
        """Read the arrays of a checkpoint onto any mesh, stored in any banks.

        Args:
            template: Tree of ShapeDtypeStructs that carry shardings.
            stacks: How the template stores layers.
            step: Which step; None is the newest.
            part: Path of the branch that the template is, such as `variables/params`; nothing else is read then. None
                reads the whole tree.

        Returns:
            The template's tree with arrays.

        Raises:
            FileNotFoundError: If there is no such step.
            ValueError: If the checkpoint's leaves are not the template's.
        """
        step = self._existing(step)
        manifest = self.manifest(step)
        if part is None:
            return read_tree(functools.partial(self._read, step), manifest, template, stacks)
        return read_tree(functools.partial(self._read_part, step, part), manifest.branch(part), template, stacks)

    def _read(self, step: int, shapes: Any) -> Any:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        return self._manager.restore(step, args=args)["state"]

    def _read_part(self, step: int, part: str, shapes: Any) -> Any:
        whole = nested({f"{part}/{path}": shape for path, shape in named_leaves(shapes).items()})
        restores = ocp.checkpoint_utils.construct_restore_args(whole)
        args = ocp.args.PyTreeRestore(item=whole, restore_args=restores, partial_restore=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            restored = named_leaves(reader.restore(self.directory / str(step) / "state", args=args))
        return nested({path.removeprefix(f"{part}/"): leaf for path, leaf in restored.items()})

    def wait(self) -> None:
        """Wait until every started save is on disk.

        Raises:
            Exception: What a save in the background failed with.
        """
        if self.directory.is_dir():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the saves and let go of the directory; the next use opens it again."""
        if "_manager" in self.__dict__:
            self._manager.close()
            del self.__dict__["_manager"]

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        chosen = steps[-1] if step is None and steps else step
        if chosen not in steps:
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise FileNotFoundError(f"There is no {wanted} in {self.directory}. Steps there: {list(steps)}.")
        return chosen
