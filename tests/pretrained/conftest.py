"""Checkpoints that the tests load: the reference fixtures, and copies of them to damage."""

import json
import shutil

import jax
import numpy as np
import pytest

from dew.pretrained import CheckpointError, load_pretrained
from tests.pretrained.checkpoints import FIXTURES, everything_in


@pytest.fixture
def copied(tmp_path):
    """Copy a fixture to a directory of its own, optionally with other config fields."""

    def copy(name="llama", **fields):
        directory = tmp_path / name
        shutil.copytree(FIXTURES / name, directory)
        config = json.loads((directory / "config.json").read_text())
        config = {key: value for key, value in {**config, **fields}.items() if value != "absent"}
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return copy


@pytest.fixture
def tensors():
    """Read all tensors of a fixture, as the format's own library reads them."""

    def read(directory):
        from safetensors.numpy import load_file

        return load_file(directory / "model.safetensors")

    return read


@pytest.fixture
def reference():
    """Tokens and logits that the reference library computed for a fixture."""
    return lambda name: dict(np.load(FIXTURES / name / "reference.npz"))


@pytest.fixture
def refused():
    """Check that a load is refused with a text, places nothing and changes no file."""

    def check(source, text, error=CheckpointError, **options):
        directory = source if source.is_dir() else source.parent
        files, arrays = everything_in(directory), len(jax.live_arrays())
        with pytest.raises(error, match=text):
            load_pretrained(source, **options)
        assert len(jax.live_arrays()) <= arrays
        assert everything_in(directory) == files

    return check
