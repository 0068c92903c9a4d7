"""Generation with families whose layers differ is the argmax of whole forward passes, ragged and on a mesh."""

import jax
import numpy as np
import pytest

from dew.inference import generate
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from dew.pretrained import load_pretrained
from tests.pretrained.checkpoints import FIXTURES

PROMPTS = [[5, 9, 2, 44, 17, 3, 8, 61, 20, 31, 6, 12], [7, 7, 30]]
NEW = 20


def by_whole_passes(model, prompts):
    run = jax.jit(model.module.apply)
    rows = [list(prompt) for prompt in prompts]
    padded = np.zeros((len(rows), 40), np.int32)
    for _ in range(NEW):
        for number, row in enumerate(rows):
            padded[number, : len(row)] = row
        best = np.argmax(run(model.variables, padded), axis=-1)
        for number, row in enumerate(rows):
            row.append(int(best[number, len(row) - 1]))
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


SPLIT = {"fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    "name, mesh", [("gemma3_text", SPLIT), ("olmo3", SPLIT), ("gpt_oss", {"expert": 2, "fsdp": 2, "tensor": 2})]
)
def test_generation_is_the_argmax_of_whole_passes(name, mesh):
    model = load_pretrained(FIXTURES / name)
    want = by_whole_passes(model, PROMPTS)
    assert len({tuple(row) for row in want}) == len(want)
    for each in (build_mesh(MeshSpec(), jax.devices()[:1]), mesh):
        placed = load_pretrained(FIXTURES / name, mesh=each, layout=Layout(min_shard=1, tolerance=0.5))
        got = generate(placed.module, placed.variables, PROMPTS, max_new_tokens=NEW)
        assert [list(row) for row in got.tokens] == want
