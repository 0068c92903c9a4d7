"""Draw the exchanges of attention over split positions as SVG pictures: what each device holds, computes and sends.

Run `python tools/draw_exchanges.py docs/pictures`. A picture's squares are pairs of a block of queries (down) and of
keys (across), coloured by the device that computes them; they come from the functions that the exchanges run by.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dew.parallel.banded import banded_reach
from dew.parallel.gather import block_pairs
from dew.parallel.ring import ring_hops
from dew.parallel.stripes import stripe_owner

DEVICES, BLOCKS = 4, 8
CELL, LEFT, TOP = 22, 96, 40
COLOURS = ("#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc")
EMPTY = "#f0f0f0"
Pairs = dict[tuple[int, int], tuple[int, str]]
"""(block of queries, block of keys) to the device that computes it and a label."""


def pictures() -> dict[str, str]:
    """Draw every exchange.

    Returns:
        File name to SVG text.
    """
    striped = [stripe_owner(block, DEVICES) for block in range(BLOCKS)]
    in_order = [block // 2 for block in range(BLOCKS)]
    return {
        "all_to_all.svg": _heads(),
        "gather.svg": _squares(
            "gather: whole keys, striped queries",
            _gathered(None),
            striped,
            "device i computes blocks i and 7 - i of the queries: nine squares each",
        ),
        "ring.svg": _squares(
            "ring: striped keys go round; numbers say at which hop",
            _ring(),
            striped,
            "three squares at hop 0, two at each hop after it",
        ),
        "banded.svg": _squares(
            "band: a window of one slice",
            _band(),
            in_order,
            "to the left of its own slice a device reads the one before, sent by one shift",
        ),
    }


def _gathered(span: int | None) -> Pairs:
    pairs: Pairs = {}
    for device, own in enumerate(block_pairs(DEVICES, 1, span)):
        for number, key in own.tolist():
            query = (device, BLOCKS - 1 - device)[number]
            if key <= query:
                pairs[query, key] = (device, "")
    return pairs


def _ring() -> Pairs:
    """Number the squares of the gather by the hop at which their keys arrive."""
    hops = ring_hops(2, DEVICES, None, None)
    pairs = {
        (query, key): (device, str((device - stripe_owner(key, DEVICES)) % DEVICES))
        for (query, key), (device, _) in _gathered(None).items()
    }
    assert {int(label) for _, label in pairs.values()} == set(range(hops + 1)), "a hop for every slice"
    return pairs


def _band() -> Pairs:
    """Squares that a window of one slice of two blocks touches."""
    reach = banded_reach(2, DEVICES, 3, None)
    assert reach == 2, "a window of three blocks reaches two back"
    return {
        (query, key): (query // 2, "" if key // 2 == query // 2 else "sent")
        for query in range(BLOCKS)
        for key in range(max(0, query - reach), query + 1)
    }


def _squares(title: str, pairs: Pairs, owners: list[int], note: str) -> str:
    shapes = []
    for query in range(BLOCKS):
        y = TOP + CELL * query
        shapes.append(
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">queries {query}</text>'
            f'<rect x="{LEFT - 6}" y="{y}" width="4" height="{CELL - 2}" fill="{COLOURS[owners[query]]}"/>'
        )
        for key in range(BLOCKS):
            device, label = pairs.get((query, key), (None, ""))
            fill = EMPTY if device is None else COLOURS[device]
            x = LEFT + CELL * key
            shapes.append(f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="{fill}"/>')
            if label:
                place = f'x="{x + CELL / 2 - 1:g}" y="{y + 14}" text-anchor="middle"'
                shapes.append(f'<text {place} font-size="{8 if len(label) > 1 else 12}">{label}</text>')
    bottom = TOP + CELL * BLOCKS
    shapes.append(f'<text x="{LEFT}" y="{bottom + 14}">keys 0 to {BLOCKS - 1}</text>')
    return _picture(title, shapes, _legend(bottom + 34), note, bottom + 74, 520)


def _heads() -> str:
    """Draw which device holds which (position, head) before and after the trade."""
    shapes = []
    for panel, (name, owner) in enumerate(
        (("before", lambda position, head: position // 2), ("after", lambda position, head: head // 2))
    ):
        left = LEFT + panel * (CELL * BLOCKS + 40)
        for position in range(BLOCKS):
            for head in range(BLOCKS):
                x, y = left + CELL * head, TOP + 18 + CELL * position
                fill = COLOURS[owner(position, head)]
                shapes.append(f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="{fill}"/>')
        shapes.append(f'<text x="{left}" y="{TOP + 10}">{name}: heads across, positions down</text>')
    bottom = TOP + 18 + CELL * BLOCKS
    note = "three quarters of every slice change their device; then each device attends whole rows"
    return _picture("all-to-all: positions traded for heads", shapes, _legend(bottom + 16), note, bottom + 56, 540)


def _legend(y: int) -> list[str]:
    return [
        f'<rect x="{LEFT + 90 * device}" y="{y}" width="12" height="12" fill="{colour}"/>'
        f'<text x="{LEFT + 90 * device + 18}" y="{y + 11}">device {device}</text>'
        for device, colour in enumerate(COLOURS)
    ]


def _picture(title: str, shapes: list[str], legend: list[str], note: str, height: int, width: int) -> str:
    head = f'<text x="{LEFT}" y="18" font-weight="bold">{title}</text>'
    foot = f'<text x="{LEFT}" y="{height - 12}">{note}</text>'
    body = "\n".join([head, *shapes, *legend, foot])
    style = 'font-family="sans-serif" font-size="12"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {style}>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


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
