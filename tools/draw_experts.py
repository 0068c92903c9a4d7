"""Draw how tokens go to their experts: `python tools/draw_experts.py` writes docs/pictures/expert_exchange.svg.

The routing of the picture is computed by `dew.nn.router.choose`; an arrow is one token that goes to another device.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from dew.nn.router import RouterSpec, choose

DEVICES, TOKENS, EXPERTS = 2, 4, 4
COLOURS = ("#4c78a8", "#f58518")
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "expert_exchange.svg"


def picture() -> str:
    """Draw tokens on the left, the experts of each device on the right, an arrow for each token and device."""
    logits = jax.random.normal(jax.random.key(6), (DEVICES * TOKENS, EXPERTS))
    chosen = np.asarray(choose(logits, None, RouterSpec(top_k=2)).experts)
    height = 40 + DEVICES * TOKENS * 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 560 {height}" font-family="sans-serif" font-size="12">',
        '<text x="20" y="18">tokens, by device</text><text x="380" y="18">experts, by device</text>',
    ]
    for expert in range(EXPERTS):
        y = 30 + expert * (height - 40) // EXPERTS
        colour = COLOURS[expert * DEVICES // EXPERTS]
        parts.append(f'<rect x="380" y="{y}" width="150" height="34" rx="4" fill="{colour}" fill-opacity="0.3"/>')
        parts.append(f'<text x="392" y="{y + 21}">expert {expert}</text>')
    for token, experts in enumerate(chosen):
        y, home = 30 + token * 28, token // TOKENS
        parts.append(f'<rect x="20" y="{y}" width="130" height="22" rx="4" fill="{COLOURS[home]}" fill-opacity="0.3"/>')
        parts.append(f'<text x="30" y="{y + 15}">token {token}: {experts[0]} and {experts[1]}</text>')
        for device in sorted({int(expert) * DEVICES // EXPERTS for expert in experts}):
            to = 30 + (device + 0.5) * (height - 40) / DEVICES
            dash = ' stroke-dasharray="4 3"' if device == home else ""
            line = f'x1="152" y1="{y + 11}" x2="374" y2="{to:.0f}"'
            parts.append(f'<line {line} stroke="{COLOURS[device]}" stroke-width="1.5"{dash}/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
