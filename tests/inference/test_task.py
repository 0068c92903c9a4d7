"""A saved checkpoint generates through `pipeline` what its module generates, on any mesh, for texts, chats and ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dew.inference import Greedy, TextGeneration, TopK, generate, pipeline
from dew.placement import MeshSpec
from dew.pretrained import load_pretrained, save_pretrained
from tests.inference.tiny_text import CHAT, byte_tokenizer
from tests.tiny import tiny_decoder

PROMPTS = ["to be, or", "a", "once upon a time there was"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory with weights, a tokenizer, a chat template and generation defaults, and what is in it."""
    module = tiny_decoder(vocab_size=264, max_length=128, num_layers=2)
    variables = nn.meta.unbox(jax.jit(module.init)(jax.random.key(1), jnp.zeros((1, 4), jnp.int32)))
    variables = jax.tree.map(lambda leaf: leaf * 16 if leaf.ndim > 2 else leaf, variables)
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    tokenizer = byte_tokenizer()
    save_pretrained(directory, module, variables, None, tokenizer, {"eos_token_id": 257, "max_new_tokens": 12})
    return directory, module, variables, tokenizer


@pytest.mark.parametrize("mesh", [None, MeshSpec(fsdp=4, tensor=2), {"fsdp": 2}], ids=repr)
def test_every_kind_gives_what_the_engine_gives(checkpoint, mesh):
    directory, module, variables, tokenizer = checkpoint
    task = pipeline(directory, mesh=mesh)
    ids = [tokenizer.encode(text) for text in PROMPTS]
    want = generate(module, variables, ids, max_new_tokens=12, stop_token_ids=[257])
    assert task(ids) == [list(row) for row in want.sequences]
    texts = task(PROMPTS)
    assert [text.startswith(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)] == [True] * 3
    assert texts == [
        prompt + tokenizer.decode([t for t in row if t < 256]) for prompt, row in zip(PROMPTS, want.tokens, strict=True)
    ]
    assert task(PROMPTS, strip_prompt=True)[1] == texts[1].removeprefix(PROMPTS[1])
    reply = generate(module, variables, [tokenizer.chat(CHAT)], max_new_tokens=12, stop_token_ids=[257]).tokens[0]
    assert task(CHAT) == tokenizer.decode([t for t in reply if t < 256])


def test_limits_stops_and_draws_pass_through(checkpoint):
    task = pipeline(load_pretrained(checkpoint[0]))
    assert isinstance(task, TextGeneration)
    free = task([5, 6, 7], 20, stop_token_ids=[])
    assert len(free) == 23
    assert len(task([5, 6, 7], max_length=10, stop_token_ids=[])) == 10
    stop = free[8]
    assert task([5, 6, 7], 20, stop_token_ids=[stop]) == free[: free.index(stop, 3) + 1]
    draws = [task([5, 6, 7], 20, sampling=TopK(k=40, temperature=3.0), key=key, stop_token_ids=[]) for key in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert task([5, 6, 7], 20, sampling=Greedy(), stop_token_ids=[]) == free


def test_what_cannot_run_is_refused(checkpoint):
    directory = checkpoint[0]
    task = pipeline(directory)
    with pytest.raises(ValueError, match=r"context of 128. Shorten it to 127 tokens or fewer"):
        task("x" * 200)
    with pytest.raises(ValueError, match="loaded already, so mesh, dtype would change nothing"):
        pipeline(load_pretrained(directory), mesh=MeshSpec(fsdp=8), dtype="float32")
    with pytest.raises(FileNotFoundError):
        pipeline(directory / "missing")


def test_a_checkpoint_without_a_tokenizer_continues_ids(checkpoint, tmp_path):
    _, module, variables, _ = checkpoint
    save_pretrained(tmp_path / "bare", module, variables)
    task = pipeline(tmp_path / "bare")
    assert len(task(np.array([[1, 2], [3, 4]]), 3, stop_token_ids=[])) == 2
    with pytest.raises(ValueError, match="without a tokenizer"):
        task("text")
    with pytest.raises(ValueError, match="stop_token_ids='auto' needs a tokenizer"):
        task([1, 2], 3)
