"""How a layer stack divides into pipeline stages, and in which order its microbatches may run.

Entry points: `Schedule`, `checked_schedule`, `staged_segment`. A stage owns whole turns of the one loop that runs
the stack, so that every stage computes the same function of its own layers.
"""

from typing import Any, Literal, get_args

from dew.nn.backbones.banks import Segment, bank_name
from dew.placement.layout import LayoutRefused

Schedule = Literal["gpipe", "1f1b"]


def checked_schedule(schedule: Any) -> Schedule:
    """Check the name of a pipeline schedule.

    Args:
        schedule: The name.

    Raises:
        ValueError: If there is no such schedule.
    """
    if schedule not in get_args(Schedule):
        raise ValueError(f"schedule must be 'gpipe' or '1f1b'. Received: schedule={schedule!r}")
    return schedule


def staged_segment(segments: tuple[Segment, ...], stages: int, *, is_banked: bool) -> Segment:
    """Give the loop that pipeline stages share out.

    Args:
        segments: The loops that run the layers.
        stages: Stages of the mesh.
        is_banked: Whether like layers are stored in banks.

    Returns:
        The only segment, with a multiple of `stages` turns.

    Raises:
        LayoutRefused: If there are several loops, or their turns do not divide.
    """
    if not is_banked:
        raise LayoutRefused(
            f"A mesh with stage={stages} splits banks of layers, and scan_layers=False stores each layer on its own: "
            "no stage could hold its layers without a copy per step. Use scan_layers=True."
        )
    layers = sum(segment.period * segment.repeats for segment in segments)
    if len(segments) > 1:
        loops = ", ".join(bank_name(run).removeprefix("layers_") for segment in segments for run in segment.runs)
        raise LayoutRefused(
            f"A mesh with stage={stages} needs {layers} layers whose pattern repeats in every stage, stored as one "
            f"loop. These are {len(segments)} loops, over the layers {loops} (first_last_step). Use stage=1, a pattern "
            "that repeats, or no bound bank_layers."
        )
    (segment,) = segments
    if segment.repeats % stages:
        fits = [count for count in range(2, segment.repeats + 1) if segment.repeats % count == 0]
        pattern = "layers" if segment.period == 1 else f"repeats of a pattern of {segment.period} layers"
        advice = f"Use stage={' or '.join(map(str, fits))}." if fits else "Use stage=1."
        raise LayoutRefused(
            f"A mesh with stage={stages} does not divide the model's {segment.repeats} {pattern}. {advice}"
        )
    return segment
