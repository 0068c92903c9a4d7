"""A checkpoint of 54 GB that takes no disk: each tensor is read once, in small reads, each device holds its part."""

import math
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tools():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import survey_load
        import synthetic_checkpoint
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return survey_load, synthetic_checkpoint


@pytest.fixture(scope="module")
def sparse(tools, tmp_path_factory):
    """A sharded checkpoint in the shape of Gemma 2 27B whose values are holes."""
    _, synthetic = tools
    directory = tmp_path_factory.mktemp("sparse")
    synthetic.write_safetensors(directory, synthetic.gemma2_27b_config(), max_shard_bytes=5e9, sparse=True)
    files = list(directory.glob("*.safetensors"))
    assert len(files) == 12
    assert sum(path.stat().st_size for path in files) > 54e9
    if sum(path.stat().st_blocks * 512 for path in files) > 50e6:
        pytest.skip("this file system writes the holes")
    return directory


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_a_27b_checkpoint_is_read_once_in_small_reads(tools, sparse, mesh):
    survey, synthetic = tools
    shapes = synthetic.tensor_shapes(synthetic.gemma2_27b_config())
    found = survey.survey(sparse, mesh)
    assert found["names"] == set(shapes)
    assert found["left"] == set()
    stored = sum(2 * math.prod(shape) for shape in shapes.values())
    assert found["stored_bytes"] == found["read_bytes"] == stored
    assert found["largest_read_bytes"] <= 4 * 2**20
    replicated = sum(2 * math.prod(shape) for shape in shapes.values() if len(shape) == 1)
    assert max(found["device_bytes"]) <= stored / 8 + replicated
    assert len(found["device_bytes"]) == 8
