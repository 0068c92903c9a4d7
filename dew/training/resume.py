"""What of a training state goes into a checkpoint, and how it comes back.

Entry points: `saved_items`, `restore_state`. An open accumulation window is saved as it is,
without an early update.
"""

from __future__ import annotations

from typing import Any

import jax

from dew.checkpoint.manifest import shapes_on
from dew.checkpoint.save import Checkpoints
from dew.placement.stacks import StackView
from dew.training.state import TrainState, empty_accumulator

FIELDS = ("step", "microstep", "updates", "variables", "opt_state", "key")


def saved_items(state: TrainState, accumulation: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a state into the arrays and the facts that a checkpoint keeps.

    Args:
        state: A state between two steps.
        accumulation: Batches per update.

    Returns:
        Arrays by field, the window's sums only while it is open, and the facts to check first.
    """
    microstep = int(state.microstep)
    tree = {name: getattr(state, name) for name in FIELDS}
    if microstep:
        tree["accumulator"] = state.accumulator
    return tree, {"accumulation": accumulation, "microstep": microstep}


def restore_state(
    checkpoints: Checkpoints, shapes: TrainState, shardings: TrainState, stacks: StackView, accumulation: int
) -> tuple[TrainState, Any]:
    """Read the latest checkpoint into a state on the mesh.

    Args:
        checkpoints: Where it is.
        shapes: Shapes of the state.
        shardings: NamedShardings of the state.
        stacks: How the state stores layers.
        accumulation: Batches per update.

    Returns:
        The state and the position of its data.

    Raises:
        ValueError: If it was saved inside a window of another length, or by a model or optimizer of
            another structure.
    """
    step = checkpoints.latest()
    manifest = checkpoints.manifest(step)
    microstep, window = manifest.facts["microstep"], manifest.facts["accumulation"]
    if microstep and window != accumulation:
        raise ValueError(
            f"The checkpoint of step {step} was saved after {microstep} of the {window} batches of an update; "
            f"accumulation={accumulation} cannot finish that window. Resume with accumulation={window}."
        )
    fields = (*FIELDS, "accumulator") if microstep else FIELDS
    template = {name: shapes_on(getattr(shapes, name), getattr(shardings, name)) for name in fields}
    values = checkpoints.restore(template, stacks=stacks, step=step)
    if "accumulator" not in values:
        values["accumulator"] = None
        if accumulation > 1:
            make = jax.jit(lambda: empty_accumulator(shapes.params), out_shardings=shardings.accumulator)
            values["accumulator"] = make()
    return TrainState(**values), manifest.position
