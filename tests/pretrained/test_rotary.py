"""Rotary parameters of a config give the reference's tables, also far beyond the original context."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn.rope import RotarySpec, rotary_tables
from dew.pretrained.families.rotary import rotary_of, write_rotary
from tests.pretrained.checkpoints import FIXTURES

TABLES = dict(np.load(FIXTURES / "rotary.npz"))
SCALINGS = sorted({name.split("/")[0] for name in TABLES})
POSITIONS = sorted({int(name.split("/")[1]) for name in TABLES if not name.endswith("config")})
HEAD_DIM, MAX_LENGTH = 12, 16384


def parameters(scaling):
    return json.loads(TABLES[f"{scaling}/config"].tobytes())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_tables_are_those_of_the_reference(scaling):
    assert POSITIONS[-1] == 8193
    spec = rotary_of(parameters(scaling), MAX_LENGTH, "here")
    # Each position is a row of its own, as long as its position says.
    got = np.stack(rotary_tables(spec, HEAD_DIM, jnp.array(POSITIONS)[:, None]), axis=1)[:, :, 0]
    plain = np.stack(rotary_tables(RotarySpec(theta=spec.theta), HEAD_DIM, jnp.array(POSITIONS)[:, None]), axis=1)[
        :, :, 0
    ]
    for row, position in enumerate(POSITIONS):
        want = TABLES[f"{scaling}/{position}"]
        # The angle itself carries float32 rounding, so far out the tables agree to the rounding of the angle.
        np.testing.assert_allclose(got[row], want, atol=1e-6 + 2.5e-7 * position)
    if scaling not in ("default", "dynamic"):  # dynamic scaling begins at the longest context, which is beyond these
        assert np.abs(plain[-1] - TABLES[f"{scaling}/8193"]).max() > 0.1


@pytest.mark.parametrize("scaling", SCALINGS)
def test_parameters_are_written_as_they_were_read(scaling):
    spec = rotary_of(parameters(scaling), MAX_LENGTH, "here")
    written = write_rotary(spec, MAX_LENGTH)
    assert rotary_of(written, MAX_LENGTH, "here") == spec
    assert {key: parameters(scaling)[key] for key in written} == written
