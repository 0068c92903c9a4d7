"""SmolLM2-135M generates the greedy tokens that transformers gives, from its quantised file, on any mesh."""

import json
import pathlib

import jax
import pytest

from dew.inference import generate
from dew.inference.requests import continuation
from dew.placement import MeshSpec, build_mesh
from dew.pretrained import load_pretrained

FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "smollm2_greedy.json"

pytestmark = [pytest.mark.weights, pytest.mark.slow]


@pytest.mark.parametrize(
    "spec, devices, count", [(MeshSpec(), 1, 64), (MeshSpec(fsdp=4, tensor=2), 8, 16)], ids=["one", "mesh"]
)
def test_greedy_tokens_are_those_of_the_reference(smollm2_file, spec, devices, count):
    prompts = json.loads(FIXTURE.read_text())["prompts"]
    loaded = load_pretrained(smollm2_file, mesh=build_mesh(spec, jax.devices()[:devices]))
    ids = [loaded.tokenizer.encode(prompt["prompt"]) for prompt in prompts]
    assert ids == [prompt["prompt_ids"] for prompt in prompts]
    result = generate(
        loaded.module, loaded.variables, ids, max_new_tokens=count, mesh=loaded.mesh, layout=loaded.layout
    )
    assert [list(row) for row in result.tokens] == [prompt["output_ids"][:count] for prompt in prompts]
    if count == 64:
        ends = [prompt["first_eos"] for prompt in prompts]
        assert ends == [29, None]
        ended = generate(loaded.module, loaded.variables, ids, max_new_tokens=32, stop_token_ids=[2])
        assert ended.stopped == (True, False)
        assert [len(row) for row in ended.tokens] == [30, 32]
        text = continuation(ids[1], result.tokens[1], loaded.tokenizer)
        assert text
        assert prompts[1]["text"].endswith(text)
