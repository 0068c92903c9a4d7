"""Every type that the gguf package expands is read by slices as the package expands it whole."""

import gguf
import numpy as np
import pytest
from gguf import quants

from dew.pretrained.gguf import GgufFile, GgufSource
from dew.pretrained.source import whole

Q = gguf.GGMLQuantizationType
TYPES = sorted([Q.F32, Q.F16, *quants._type_traits], key=lambda kind: kind.name)
ROWS = 6


def width(kind):
    return max(64, 3 * gguf.GGML_QUANT_SIZES[kind][0])


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """One file with a tensor of random bytes of each type, and the same values expanded whole."""
    path = tmp_path_factory.mktemp("types") / "a.gguf"
    writer, rng, want = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0), {}
    for kind in TYPES:
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (ROWS, width(kind) // size * nbytes), np.uint8)
        writer.add_tensor(kind.name, raw, raw_dtype=kind)
        with np.errstate(all="ignore"):  # scales of random bytes overflow
            want[kind.name] = quants.dequantize(raw, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path), want


def opened(file, **options):
    return GgufSource(file, str, lambda name, rows: None, **options)


def test_the_types_are_all_that_the_package_knows():
    names = {kind.name for kind in TYPES}
    assert {
        "Q8_0",
        "Q4_0",
        "Q5_1",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ1_S",
        "IQ2_XXS",
        "IQ4_XS",
        "BF16",
    } <= names


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_any_slice_is_that_slice_of_the_whole(stored, kind):
    file, want = stored
    source, values = opened(file), want[kind.name]
    n = width(kind)
    assert source.info(kind.name) == ((ROWS, n), np.float32)
    slices = [whole((ROWS, n)), (slice(1, 4), slice(n // 3 - 1, n // 3 + 2)), (slice(5, 6), slice(n - 1, n))]
    slices += [(slice(0, 1), slice(0, 1)), (slice(2, 5), slice(7, n - 9)), (slice(2, 2), slice(0, n))]
    with np.errstate(all="ignore"):
        for index in slices:
            np.testing.assert_array_equal(source.read(kind.name, index), values[index])


@pytest.mark.parametrize("kind", [Q.F32, Q.Q8_0, Q.Q6_K], ids=lambda kind: kind.name)
def test_shifted_and_transposed_tensors(stored, kind):
    file, want = stored
    index = (slice(1, 4), slice(5, 50))
    with np.errstate(all="ignore"):
        shifted = opened(file, is_shifted=lambda name: name == kind.name)
        np.testing.assert_array_equal(shifted.read(kind.name, index), want[kind.name][index] - np.float32(1))
        turned = opened(file, is_transposed=lambda name: name == kind.name)
        assert turned.info(kind.name).shape == (width(kind), ROWS)
        np.testing.assert_array_equal(turned.read(kind.name, index[::-1]), want[kind.name][index].T)
    assert kind.name not in set(opened(file, left_out=(kind.name,)).names())
