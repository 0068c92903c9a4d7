"""Laws of a decoder with any mixers: a slow decoder's numbers whole, cached, padded, packed, stored apart, on a mesh.

Entry point: `Decoder`, whose `assert_` methods are the laws.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dew.inference import generate
from dew.nn.router import BALANCE_BIAS
from dew.nn.sharding import unboxed
from dew.objectives.language import LanguageModel
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from dew.placement.rules import DEFAULT_RULES
from dew.placement.stacks import stack_view
from dew.training.trainer import Trainer
from dew.tree import named_leaves
from tests.nn import slow_decoder
from tests.parallel.sequences import packed_batch
from tests.tiny import tiny_batch
from tools.mesh_law import record_gradient

LENGTH = 24
TOKENS = tiny_batch(rows=4, length=LENGTH)["tokens"][:, :-1]
STRICT = Layout(rules=(*DEFAULT_RULES, ("norm", "tensor")), min_shard=1, tolerance=0)


def assert_close(got, want, tolerance=1e-5, what=""):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max(), err_msg=what)


class Decoder:
    """A model, variables that are far from their initial values, and what the laws compare with, computed once.

    Args:
        module: The model.
        drawn: Gives a weight from its path, its initial value and noise. Of large embeddings, since the first norm
            divides by their size: small ones magnify the rounding of float32 in every gradient.
        layout: Layout of the meshes.
    """

    def __init__(self, module, drawn, layout=STRICT):
        self.module, self.layout = module, layout
        variables = unboxed(jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
        keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(variables))))
        self.variables = jax.tree_util.tree_map_with_path(
            lambda path, leaf: drawn([part.key for part in path], leaf, jax.random.normal(next(keys), leaf.shape)),
            variables,
        )
        self.apply = jax.jit(module.apply)
        self.greedy = functools.cache(self._greedy)

    @functools.cached_property
    def logits(self):
        """What the slow decoder makes of `TOKENS`."""
        weights = stack_view(self.module).unstack(self.variables)["params"]
        weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
        return slow_decoder.logits(self.module, weights, TOKENS)

    def assert_whole_sequences_are_the_slow_decoder(self):
        assert_close(self.apply(self.variables, TOKENS), self.logits)

    def assert_decoding_is_the_slow_decoder(self, blocks):
        """Read blocks of so many tokens, one after the other; gives the cache."""
        assert sum(blocks) == LENGTH
        run = jax.jit(lambda tokens, cache: self.module.apply(self.variables, tokens, cache=cache))
        parts, cache = [], self.module.init_cache(len(TOKENS), LENGTH)
        for block in np.split(TOKENS, np.cumsum(blocks)[:-1], axis=1):
            logits, cache = run(block, cache)
            parts.append(logits)
        assert_close(np.concatenate(parts, axis=1), self.logits)
        assert int(cache.index) == LENGTH
        return cache

    def assert_padding_on_the_left_changes_nothing(self, borders):
        """Read padded prompts in blocks with these borders, then a column of padding, then a token of each row."""
        lengths = np.array([LENGTH, 9, 2, 1])
        tokens = np.full((4, LENGTH), 5, np.int32)
        for row, length in enumerate(lengths):
            tokens[row, LENGTH - length :] = TOKENS[row, :length]
        real = np.arange(LENGTH) >= LENGTH - lengths[:, None]

        @jax.jit
        def run(tokens, real, cache):
            return self.module.apply(self.variables, tokens, segment_ids=real.astype(jnp.int32), cache=cache)

        cache, parts = self.module.init_cache(4, 2 * LENGTH), []
        for block in np.split(np.arange(LENGTH), borders):
            logits, cache = run(tokens[:, block], real[:, block], cache)
            parts.append(logits)
        got = np.concatenate(parts, axis=1)
        for row, length in enumerate(lengths):
            assert_close(got[row, LENGTH - length :], self.logits[row, :length], what=f"row {row}")
        following = np.array([[1], [TOKENS[1, 9]], [TOKENS[2, 2]], [TOKENS[3, 1]]], np.int32)
        nobody = np.zeros((4, 1), bool)
        _, cache = run(following, nobody, cache)
        logits, _ = run(following, ~nobody, cache)
        for row in (1, 2, 3):
            assert_close(logits[row, 0], self.logits[row, lengths[row]], what=f"row {row} goes on")

    def assert_packed_documents_are_each_alone(self):
        """Read three documents, each of which is the beginning of a row, and padding."""
        order = np.concatenate([np.arange(9), np.arange(1), np.arange(10), np.arange(4)])
        segments = np.array([[1] * 9 + [2] * 1 + [3] * 10 + [0] * 4] * 4)
        positions = order[None].repeat(4, 0)
        got = self.apply(self.variables, TOKENS[:, order], positions=positions, segment_ids=segments)
        for first, last in ((0, 9), (9, 10), (10, 20)):
            assert_close(got[:, first:last], self.logits[:, : last - first], what=f"tokens {first} to {last}")

    def assert_storage_changes_nothing(self, **storage):
        apart = self.module.clone(**storage)
        stored = stack_view(apart).stack(stack_view(self.module).unstack(self.variables))
        assert_close(jax.jit(apart.apply)(stored, TOKENS), self.logits)

    @functools.cached_property
    def trained_on_one_device(self):
        return self._trained(build_mesh(MeshSpec(), jax.devices()[:1]))

    def _trained(self, mesh, **fields):
        """Losses, gradients and weights per layer of three updates on packed rows, and where the large leaves are."""
        module = self.module.clone(**fields)
        # A large eps: Adam divides by the gradient's own size, which would magnify rounding where that is near 0.
        optimizer = optax.chain(record_gradient(), optax.clip_by_global_norm(1.0), optax.adamw(3e-3, eps=1e-2))
        run = Trainer(LanguageModel(module), optimizer, mesh=mesh, layout=self.layout)
        loop = run.loop(run.place(jax.device_get(self.variables)))  # a copy: steps give their state away
        placed = named_leaves(loop.state.variables)
        large = {path: leaf.sharding.spec for path, leaf in placed.items() if leaf.size >= 512}
        losses, parts = [], {}
        for update in range(3):
            (result,) = loop.run([packed_batch(update)])
            losses.append(result.read()["loss"].value())
            parts[f"gradient {update}"] = jax.device_get(loop.state.opt_state[0].gradient)
        parts["weights"] = jax.device_get(loop.state.params)
        view = stack_view(module)
        numbers = named_leaves({name: view.unstack({"params": part}) for name, part in parts.items()})
        # No gradient moves a balance bias; it is among the weights.
        unmoved = [path for path in numbers if path.startswith("gradient") and path.endswith(BALANCE_BIAS)]
        return losses, {path: leaf for path, leaf in numbers.items() if path not in unmoved}, large

    def assert_a_mesh_trains_as_one_device(self, spec, **fields):
        """Train three updates, with other fields of the model, from weights that the mesh splits."""
        want_losses, want, _ = self.trained_on_one_device
        losses, got, large = self._trained(spec, **fields)
        np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
        assert got.keys() == want.keys()
        for path, leaf in want.items():
            assert np.abs(leaf).max() > 0, f"{path} is zero: the test could not fail"
            assert_close(got[path], leaf, what=path)
        wanted = {axis for axis in ("fsdp", "tensor") if getattr(spec, axis) > 1}
        for path, place in large.items():
            axes = {axis for entry in place for axis in np.atleast_1d(entry) if axis}
            assert wanted <= axes, f"{path} is placed {place}"

    def _greedy(self, prompts, count):
        """Greedy tokens of one device from the whole rows, run again for every token, without a cache."""
        rows = np.zeros((len(prompts), max(map(len, prompts)) + count), np.int32)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt)] = prompt
        for step in range(count):
            logits = np.asarray(self.apply(self.variables, rows))
            for row, prompt, scores in zip(rows, prompts, logits, strict=True):
                row[len(prompt) + step] = np.argmax(scores[len(prompt) + step - 1])
        return tuple(
            tuple(row[len(prompt) : len(prompt) + count].tolist()) for row, prompt in zip(rows, prompts, strict=True)
        )

    def assert_greedy_is_the_full_forward_repeated(self, prompts, count, spec=None):
        """Generate on a mesh, on one device where there is none."""
        variables, options = self.variables, {}
        if spec is not None:
            mesh = build_mesh(spec)
            shapes = jax.eval_shape(self.module.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
            variables = jax.device_put(variables, self.layout.shardings(mesh, shapes))
            options = {"mesh": mesh, "layout": self.layout}
        got = generate(self.module, variables, prompts, max_new_tokens=count, **options)
        assert got.tokens == self.greedy(prompts, count)
        assert max(map(len, map(set, got.tokens))) > 3, "the law says little about a model that repeats itself"
