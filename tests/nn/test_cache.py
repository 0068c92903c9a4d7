"""The cache: what is written is read back, at the cursor, in its layer, and only where it is marked."""

import jax
import jax.numpy as jnp
import numpy as np

from dew.nn.cache import KEY_VALUE_NAMES, LATENT_NAMES, SLOT_DIM, KeyValueShape, LatentShape, empty_cache

L, B, K, S, H = 3, 2, 2, 7, 4
HEADS = KeyValueShape(num_heads=K, head_dim=H)


def test_a_write_fills_its_layer_from_the_cursor_and_nothing_else():
    cache = empty_cache(((HEADS, L),), B, S, "float32")
    key, value = jax.random.normal(jax.random.key(0), (2, B, 3, K, H))
    window = cache.banks[0].window(1, jnp.int32(2))
    after, keys, values = window.append(key, value)
    want = np.zeros((L, B, K, S, H), np.float32)
    want[1, :, :, 2:5] = np.asarray(key).swapaxes(1, 2)
    np.testing.assert_array_equal(after.bank.keys, want)
    np.testing.assert_array_equal(keys, want[1])
    np.testing.assert_array_equal(values[:, :, 2:5].swapaxes(1, 2), value)
    np.testing.assert_array_equal(window.bank.keys, np.zeros_like(want))


def test_a_token_of_latent_attention_takes_its_latent_and_its_shared_key_whatever_the_heads():
    (bank,) = empty_cache(((LatentShape(rank=6, rotary_dim=2), L),), B, S, "float32").banks
    assert [leaf.shape for leaf in jax.tree.leaves(bank)] == [(L, B, S, 8)]
    assert bank.logical_names().latents == LATENT_NAMES
    new = jax.random.normal(jax.random.key(0), (B, 3, 8))
    after, seen = bank.window(1, jnp.int32(2)).append(new)
    want = np.zeros((L, B, S, 8), np.float32)
    want[1, :, 2:5] = new
    np.testing.assert_array_equal(after.bank.latents, want)
    np.testing.assert_array_equal(seen, want[1])
    np.testing.assert_array_equal(after.bank.with_slots(lambda x, dim: jnp.roll(x, 1, dim)).latents[1, :, 3:6], new)


def test_marks_follow_the_cursor():
    cache = empty_cache(((HEADS, L),), B, S, "float32").replace(index=jnp.int32(4))
    marked = cache.marked(jnp.array([[True, True], [False, True]]))
    np.testing.assert_array_equal(np.flatnonzero(marked.valid[0]), [4, 5])
    np.testing.assert_array_equal(np.flatnonzero(marked.valid[1]), [5])
    assert int(marked.index) == 4
    assert marked.length == S


def test_the_slots_are_the_dimension_that_says_so():
    cache = empty_cache(((HEADS, L), (HEADS, 1)), B, S, "bfloat16")
    arrays = jax.tree.leaves(cache.banks)
    assert [array.shape[SLOT_DIM] for array in arrays] == [S] * 4
    assert {len(KEY_VALUE_NAMES)} == {array.ndim for array in arrays}
    assert {array.dtype for array in arrays} == {jnp.bfloat16.dtype}
