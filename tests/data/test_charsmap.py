"""A compiled normalisation is refused where some text would lead out of it, and taken where none does."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from dew.data.tokenizers.charsmap import check_charsmap


def charsmap(pairs: dict[str, str]) -> bytes:
    """Compile replacements of single bytes into a double array, as SentencePiece lays it out."""
    units = np.zeros(1024, np.uint32)
    blob = b""
    units[0] = 1 << 10 << 0  # children of the root at 1 ^ letter ... within the first 256 units
    for number, (letter, replacement) in enumerate(pairs.items()):
        code = ord(letter)
        place, leaf = 1 ^ code, 512 + number
        offset = place ^ leaf
        units[place] = offset << 10 | 1 << 8 | code
        units[leaf] = 1 << 31 | len(blob)
        blob += replacement.encode() + b"\0"
    return struct.pack("<I", units.nbytes) + units.tobytes() + blob


GOOD = charsmap({"a": "b", "c": "größe", "d": ""})
INSIDE = charsmap({"a": "ö"}).replace(struct.pack("<I", 1 << 31), struct.pack("<I", 1 << 31 | 1), 1)


def test_a_sound_one_is_taken_and_does_what_it_says():
    check_charsmap(GOOD, "m.model")
    assert normalizers.Precompiled(GOOD).normalize_str("a c") == "b größe"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "trie has 0 of 0 bytes"),
        (b"\xff\xff\xff\xff" + GOOD[4:], "trie has 4294967295"),
        (GOOD[:4] + struct.pack("<I", 200000 << 10) + GOOD[8:], "points to"),
        (GOOD[:-9], "a replacement begins"),
        (GOOD[:-3] + b"\xff\0\0", "not UTF-8"),
        (INSIDE, "inside"),
    ],
)
def test_what_leads_out_of_it_is_named(data, message):
    with pytest.raises(ValueError, match=f"damaged precompiled_charsmap: .*{message}"):
        check_charsmap(data, "m.model")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_what_is_taken_never_panics(changes):
    data = bytearray(GOOD)
    for place, value in changes:
        data[place] = value
    try:
        check_charsmap(bytes(data), "m.model")
    except ValueError:
        return
    normalizer = normalizers.Precompiled(bytes(data))
    for text in ("a c d", "the quick größe \U0001f682", "\x01\x7f"):
        normalizer.normalize_str(text)
