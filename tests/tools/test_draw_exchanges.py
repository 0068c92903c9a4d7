"""The committed pictures of the exchanges are what the tool draws, and show equal work."""

import collections
import pathlib

import pytest

from tools import draw_exchanges, draw_experts

PICTURES = pathlib.Path(__file__).resolve().parents[2] / "docs" / "pictures"


@pytest.mark.parametrize("name", ["all_to_all.svg", "gather.svg", "ring.svg", "banded.svg", "expert_exchange.svg"])
def test_the_committed_picture_is_what_the_tool_draws(name):
    drawn = draw_experts.picture() if name == draw_experts.PICTURE.name else draw_exchanges.pictures()[name]
    assert (PICTURES / name).read_text() == drawn


def test_every_causal_square_is_computed_once_and_by_devices_in_equal_number():
    for pairs in (draw_exchanges._gathered(None), draw_exchanges._ring()):
        assert set(pairs) == {(query, key) for query in range(8) for key in range(query + 1)}
        assert set(collections.Counter(device for device, _ in pairs.values()).values()) == {9}
    hops = collections.Counter(draw_exchanges._ring().values())
    assert {hops[device, str(hop)] for device in range(4) for hop in range(1, 4)} == {2}
