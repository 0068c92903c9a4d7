"""Draw the timetables of the pipeline schedules as SVG pictures: a row per stage, time to the right.

Run `python tools/draw_schedules.py docs/pictures`. The pictures come from the timetables that the schedules run by;
a backward pass is drawn twice as wide as a forward pass.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from dew.parallel.schedules import IDLE, Timetable, gpipe_timetable, one_f_one_b_timetable

STAGES, MICROBATCHES = 4, 12
UNIT, HEIGHT, LEFT, TOP = 17, 26, 62, 30
FORWARD, BACKWARD, EMPTY = "#9ecae1", "#fdae6b", "#f0f0f0"
TITLES = {
    "gpipe": "GPipe: all microbatches forward, then all backward",
    "one_f_one_b": "1F1B: backward as soon as the last stage has scored",
}


def pictures() -> dict[str, str]:
    """Draw every schedule.

    Returns:
        File name to SVG text.
    """
    tables = {
        "gpipe": gpipe_timetable(STAGES, MICROBATCHES),
        "one_f_one_b": one_f_one_b_timetable(STAGES, MICROBATCHES),
    }
    return {f"{name}.svg": svg(table, TITLES[name]) for name, table in tables.items()}


def svg(table: Timetable, title: str) -> str:
    """Draw one timetable.

    Args:
        table: The timetable.
        title: Line above the picture.

    Returns:
        SVG text.
    """
    shapes, x = [], LEFT
    for forward, backward in zip(table.forward, table.backward, strict=True):
        for entries, width, colour in ((forward, UNIT, FORWARD), (backward, 2 * UNIT, BACKWARD)):
            if (entries != IDLE).any():
                shapes.extend(_cell(x, stage, width, int(m), colour) for stage, m in enumerate(entries))
                x += width
    labels = [
        f'<text x="{LEFT - 8}" y="{TOP + HEIGHT * stage + 17}" text-anchor="end">stage {stage}</text>'
        for stage in range(table.num_stages)
    ]
    bottom = TOP + HEIGHT * table.num_stages
    kept = most_kept(table)
    legend = (
        f'<text x="{LEFT}" y="{bottom + 20}">numbers: microbatches; blue forward, orange backward; idle '
        f"{table.bubble():.0%}; at most {kept} microbatches kept by a stage</text>"
    )
    body = "\n".join([f'<text x="{LEFT}" y="18" font-weight="bold">{title}</text>', *labels, *shapes, legend])
    style = 'font-family="sans-serif" font-size="12"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{x + 8}" height="{bottom + 30}" {style}>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def most_kept(table: Timetable) -> int:
    """Count the microbatches that a stage has run forward and not yet backward, at most.

    Args:
        table: The timetable.
    """
    started, finished = (np.cumsum(entries != IDLE, axis=0) for entries in (table.forward, table.backward))
    # The backward pass of a tick reads its input before giving it up.
    return int((started - np.concatenate([np.zeros_like(finished[:1]), finished[:-1]])).max())


def _cell(x: int, stage: int, width: int, microbatch: int, colour: str) -> str:
    y = TOP + HEIGHT * stage
    fill = EMPTY if microbatch == IDLE else colour
    box = f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT - 3}" fill="{fill}" stroke="white"/>'
    if microbatch == IDLE:
        return box
    return f'{box}<text x="{x + width / 2:g}" y="{y + 16}" text-anchor="middle">{microbatch}</text>'


def main(arguments: list[str] | None = None) -> None:
    """Write the pictures into a directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the pictures go")
    directory = parser.parse_args(arguments).directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (directory / name).write_text(text)


if __name__ == "__main__":
    main()
