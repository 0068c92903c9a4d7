"""How a layer stack divides into pipeline stages, and in which order its microbatches may run.

Entry points: `checked_schedule`, `check_prediction`, `refuse_unscheduled`, `staged_segment`. A stage owns whole turns
of the one loop that runs the stack, so that every stage computes the same function of its own layers.
"""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp

from dew.nn.backbones.banks import Segment, segments, whole_period
from dew.nn.block import LayerSpec
from dew.parallel.schedules import SCHEDULES, ScheduleName
from dew.placement.layout import LayoutRefused

MOST_RUNS = 8
"""Runs of like layers that an error lists."""


def checked_schedule(schedule: Any) -> ScheduleName:
    """Check the name of a pipeline schedule.

    Args:
        schedule: The name.

    Raises:
        ValueError: If there is no such schedule.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be {' or '.join(map(repr, SCHEDULES))}. Received: schedule={schedule!r}")
    return schedule


def check_prediction(is_asked: bool, schedule: ScheduleName) -> None:
    """Refuse layers that predict further tokens under a schedule that scores before they could.

    Args:
        is_asked: Whether a model has such layers.
        schedule: Its schedule.

    Raises:
        ValueError: If the schedule scores between the stages' passes.
    """
    if is_asked and SCHEDULES[schedule].scores_inside:
        raise ValueError(
            f"schedule={schedule!r} scores between the stages' passes, before layers that predict further tokens have "
            "read their output. Use schedule='gpipe', or prediction=None."
        )


def refuse_unscheduled(module: Any, stages: int, scored_by: str | None) -> None:
    """Refuse training that the schedule of a module's pipeline cannot do.

    Args:
        module: A module; one without a schedule can be trained by anything.
        stages: Stages of the mesh.
        scored_by: What scores in place of the token cross entropy of `LanguageModel`, in words; None where that does.

    Raises:
        ValueError: If the schedule scores between the stages' passes, and something else is to score or the module
            computes in float16.
    """
    schedule = getattr(module, "schedule", None)
    if stages == 1 or schedule is None or not SCHEDULES[schedule].scores_inside:
        return
    if scored_by is not None:
        raise ValueError(
            f"schedule={schedule!r} scores between the stages' passes and trains with the token cross entropy of "
            "LanguageModel, loss='auto' of the facade, only. Use schedule='gpipe' for another loss. "
            f"Received: {scored_by}"
        )
    refuse_float16(module.dtype)


def refuse_float16(dtype: Any) -> None:
    """Refuse to compute gradients in a dtype that needs a loss scale before there is one.

    Args:
        dtype: The compute dtype.

    Raises:
        ValueError: If it is float16.
    """
    if jnp.dtype(dtype) == jnp.float16:
        raise ValueError(
            "schedule='1f1b' computes gradients before a loss scale is known, which float16 needs. Use "
            f"dtype='bfloat16' or schedule='gpipe'. Received: dtype={jnp.dtype(dtype).name}"
        )


def staged_segment(
    layers: tuple[LayerSpec, ...], stages: int, *, scan_layers: bool = True, bank_layers: int | None = None
) -> Segment:
    """Give the loop that pipeline stages share out.

    Args:
        layers: Spec of each layer.
        stages: Stages of the mesh.
        scan_layers: Whether like layers are stored in banks.
        bank_layers: Most layers of a bank; None means no bound.

    Returns:
        The loop over all layers, with a multiple of `stages` turns.

    Raises:
        LayoutRefused: If the layers do not repeat in every stage, or are not stored in one bank for each place of their
            pattern.
    """
    period = whole_period(layers)
    repeats = len(layers) // period
    if repeats == 1 and len(layers) > 1:
        raise LayoutRefused(_unlike_stages(layers, stages))
    if repeats % stages or not repeats:
        fits = [count for count in range(2, repeats + 1) if repeats % count == 0]
        pattern = "layers" if period == 1 else f"repeats of a pattern of {period} layers"
        advice = f"Use stage={' or '.join(map(str, fits))}." if fits else "Use stage=1."
        raise LayoutRefused(f"A mesh with stage={stages} does not divide the model's {repeats} {pattern}. {advice}")
    if not scan_layers:
        raise LayoutRefused(
            f"A mesh with stage={stages} splits banks of layers, and scan_layers=False stores each layer on its own: "
            "no stage could hold its layers without a copy per step. Use scan_layers=True."
        )
    if repeats > (bank_layers or repeats):
        raise LayoutRefused(
            f"A mesh with stage={stages} splits banks of {repeats} layers, one for each place of the repeating "
            f"pattern, so that each stage holds its own; bank_layers={bank_layers} cuts them. Use "
            f"bank_layers={repeats} or more, or None."
        )
    (segment,) = segments(layers, scan_layers, bank_layers)
    return segment


def _unlike_stages(layers: tuple[LayerSpec, ...], stages: int) -> str:
    """Say why layers of which no pattern repeats cannot be stages, which all run one function."""
    runs = [len(list(group)) for _, group in itertools.groupby(layers)]
    shown = ", ".join(map(str, runs[:MOST_RUNS])) + (", ..." if len(runs) > MOST_RUNS else "")
    text = (
        f"A mesh with stage={stages} needs layers that repeat from stage to stage. The model's {len(layers)} layers, "
        f"in runs of {shown} alike, repeat no pattern"
    )
    share = len(layers) // stages
    place = next((place for place in range(share, len(layers)) if layers[place] != layers[place - share]), None)
    if len(layers) % stages == 0 and place is not None:
        one, other = layers[place - share], layers[place]
        fields = [field.name for field in dataclasses.fields(one)]
        unlike = " and ".join(name for name in fields if getattr(one, name) != getattr(other, name))
        text += f": layers {place - share} and {place}, {share} apart as in {stages} stages, differ in {unlike}"
    return f"{text}. Use stage=1, and fsdp or tensor for the devices."
