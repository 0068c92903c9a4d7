"""A decoder-only transformer assembled from layer specs, its like layers stored in banks.

Entry points: `LayerSpec`, `CausalTransformer`. A bank is one `[L, ...]` array per weight of a run of equal layers; a
layer of its own is stored as itself. Initial values depend on the key and a layer's own name, not on the banks.
"""

import dataclasses
import functools
import itertools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import unfreeze

from dew.arrays import Array, Float, Int
from dew.kernels.attention import Implementation, Visibility
from dew.nn.attention import AttentionSpec, SelfAttention
from dew.nn.cache import KVCache, LayerCache, empty_cache
from dew.nn.embed import TABLE_NAMES, Embedding, project
from dew.nn.masks import cached_visibility, causal_visibility
from dew.nn.mlp import Mlp, MlpSpec
from dew.nn.norm import NormSpec, RmsNorm
from dew.nn.remat import REMAT_POLICIES, checked_remat, checkpointed
from dew.nn.rope import RotarySpec, Tables, rotary_tables
from dew.nn.sharding import constrain, gather_weights, unboxed
from dew.placement.stacks import Bank, StackView

__all__ = ["REMAT_POLICIES", "CausalTransformer", "DecoderLayer", "LayerSpec"]

RESIDUAL_NAMES = ("activation_batch", "activation_length", "activation_embed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder block.

    Attributes:
        attention: Its attention.
        mlp: Its perceptron.
        norm: Norm before each of the two.
    """

    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Attributes:
        features: Width of the residual stream.
        spec: The block.
        param_dtype: Storage dtype of the weights.
        implementation: Attention kernel.
    """

    features: int
    spec: LayerSpec
    param_dtype: Any = "float32"
    implementation: Implementation = "auto"

    def setup(self) -> None:
        """Declare the block's weights."""
        spec, dtype = self.spec, self.param_dtype
        self.input_layernorm = RmsNorm(self.features, spec.norm, dtype)
        self.self_attn = SelfAttention(self.features, spec.attention, dtype, self.implementation)
        self.post_attention_layernorm = RmsNorm(self.features, spec.norm, dtype)
        self.mlp = Mlp(self.features, spec.mlp, dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        visibility: Visibility,
        rotary: Tables | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Apply the block; arguments as `SelfAttention`'s."""
        mixed, cache = self.self_attn(self.input_layernorm(x), visibility, rotary, cache)
        x = constrain(x + mixed, RESIDUAL_NAMES)
        x = constrain(x + self.mlp(self.post_attention_layernorm(x)), RESIDUAL_NAMES)
        return x, cache


class CausalTransformer(nn.Module):
    """A causal language model.

    Attributes:
        vocab_size: Rows of the token table.
        features: Width of the residual stream.
        layers: The blocks, first to last.
        norm: Norm after the last block.
        tie_embeddings: Whether the token table also scores the vocabulary.
        max_length: Longest context in tokens.
        dtype: Compute dtype.
        param_dtype: Storage dtype of the weights.
        remat: What the backward pass recomputes: None nothing, "full" everything but the blocks' inputs.
        scan_layers: Whether runs of equal layers are stored in banks and scanned.
        bank_layers: Most layers a bank may hold; None means no bound.
        attention_impl: Attention kernel.
    """

    vocab_size: int
    features: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tie_embeddings: bool = True
    max_length: int = 2048
    dtype: Any = "float32"
    param_dtype: Any = "float32"
    remat: str | None = None
    scan_layers: bool = True
    bank_layers: int | None = None
    attention_impl: Implementation = "auto"

    def __post_init__(self) -> None:
        checked_remat(self.remat)
        if self.attention_impl not in ("auto", "xla"):
            raise ValueError(
                f"attention_impl must be 'auto' or 'xla'. Received: attention_impl={self.attention_impl!r}"
            )
        if self.bank_layers is not None and self.bank_layers < 1:
            raise ValueError(f"bank_layers must be None or positive. Received: bank_layers={self.bank_layers}")
        super().__post_init__()

    def setup(self) -> None:
        """Declare the weights of every part under its own name."""
        self.declared = True
        missing = [name for name in self._parts() if not self.has_variable("params", name)]
        if not missing:
            return
        key = self.make_rng("params") if self.has_rng("params") else None
        banks = {bank.name: bank.layers for bank in self.stack_view().banks}
        for name in missing:
            part = self._parts()[name]
            self.param(name, lambda _, part=part, name=name: _initial(part, key, name, banks.get(name)), unbox=False)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
        train: bool = False,
    ) -> Any:
        """Score the next token at every position.

        Args:
            tokens: Token ids.
            positions: Position of each token in its document; None counts from 0 (from the cache's end with a cache).
            segment_ids: Document number of each token, 0 for padding; None means one document a row.
            cache: Keys and values already read; new tokens are appended to it.
            train: Accepted for callers that tell a model its mode; this model computes the same in both.

        Returns:
            Logits [B, T, V] in float32; with a cache, the pair of logits and the next cache.
        """
        hidden = self.hidden_states(tokens, positions, segment_ids, cache, train)
        if cache is None:
            return project(hidden, self._head())
        hidden, cache = hidden
        return project(hidden, self._head()), cache

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
        train: bool = False,
    ) -> Any:
        """Compute the output of the last norm; arguments as `__call__`'s.

        Returns:
            Hidden states [B, T, D] in the compute dtype; with a cache, the pair of hidden states and the next cache.
        """
        del train
        x = self._apply("embed_tokens", tokens)
        if cache is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] if positions is None else positions
            x = self._run_layers(x, causal_visibility(tokens.shape[1], segment_ids), self._tables(positions))
            return self._apply("norm", x)
        real = jnp.ones(tokens.shape, bool) if segment_ids is None else segment_ids > 0
        if positions is None:
            start = jnp.sum(cache.valid, axis=1, dtype=jnp.int32, keepdims=True)
            positions = jnp.maximum(start + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1, 0)
        cache = cache.marked(real)
        visibility = cached_visibility(cache.index, tokens.shape[1], cache.valid)
        x, cache = self._run_cached_layers(x, visibility, self._tables(positions), cache)
        return self._apply("norm", x), cache

    def head_weight(self, variables: Any) -> Float[Array, "V D"]:
        """Give the matrix that scores the vocabulary, [V, D]: the token table, or the untied head.

        Args:
            variables: The model's variables, with its `params` collection.
        """
        name = "embed_tokens" if self.tie_embeddings else "lm_head"
        return unboxed(variables["params"][name]["embedding"])

    def logits(self, variables: Any, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Score every token of the vocabulary for given hidden states, in float32."""
        table = self.head_weight(variables).astype(self.dtype)
        return project(hidden, gather_weights(table, TABLE_NAMES))

    def stack_view(self) -> StackView:
        """Say which layers are stored together."""
        return StackView(
            tuple(
                Bank(_bank_name(run), tuple(f"layers_{index}" for index in run)) for run in self._runs() if len(run) > 1
            )
        )

    def init_cache(self, batch: int, length: int, dtype: Any = None) -> KVCache:
        """Make an empty cache.

        Args:
            batch: Rows.
            length: Slots a row has: prompt and new tokens, padding included.
            dtype: Dtype of keys and values; None means the compute dtype.
        """
        heads = [(spec.attention.num_kv_heads, spec.attention.head_dim) for spec in self.layers]
        shapes = tuple((len(list(run)), *shape) for shape, run in itertools.groupby(heads))
        return empty_cache(shapes, batch, length, self.dtype if dtype is None else dtype)

    def _runs(self) -> tuple[tuple[int, ...], ...]:
        """Group the layers into runs that are stored together."""
        return _runs(self.layers, self.scan_layers, self.bank_layers)

    def _parts(self) -> dict[str, nn.Module]:
        """Name every part that is stored: the table, a block per run, the norm, the untied head."""
        dtype = self.param_dtype
        parts: dict[str, nn.Module] = {"embed_tokens": Embedding(self.vocab_size, self.features, dtype, parent=None)}
        for run in self._runs():
            parts[_bank_name(run)] = self._layer(run)
        parts["norm"] = RmsNorm(self.features, self.norm, dtype, parent=None)
        if not self.tie_embeddings:
            parts["lm_head"] = Embedding(self.vocab_size, self.features, dtype, parent=None)
        return parts

    def _layer(self, run: tuple[int, ...]) -> DecoderLayer:
        return DecoderLayer(self.features, self.layers[run[0]], self.param_dtype, self.attention_impl, parent=None)

    def _weights(self, name: str) -> Any:
        """Give the stored weights of a part."""
        assert self.declared, "setup has declared the weights"
        return unboxed(unfreeze(self.get_variable("params", name)))

    def _ready(self, part: nn.Module, weights: Any) -> Any:
        """Cast weights to the compute dtype and gather them where they are used."""
        weights = jax.tree.map(lambda weight: weight.astype(self.dtype), weights)
        return gather_weights(weights, _logical_names(part))

    def _apply(self, name: str, *inputs: Any) -> Any:
        """Apply a part that is stored on its own."""
        part = self._parts()[name]
        return part.apply({"params": self._ready(part, self._weights(name))}, *inputs)

    def _head(self) -> Float[Array, "V D"]:
        name = "embed_tokens" if self.tie_embeddings else "lm_head"
        return self._ready(self._parts()[name], self._weights(name))["embedding"]

    def _tables(self, positions: Int[Array, "B T"]) -> dict[tuple[RotarySpec, int], Tables]:
        """Compute the rotary tables once for all layers that share them."""
        keys = {(spec.attention.rotary, spec.attention.head_dim) for spec in self.layers if spec.attention.rotary}
        return {key: rotary_tables(key[0], key[1], positions) for key in keys}

    def _block(self, run: tuple[int, ...], visibility: Visibility, tables: dict) -> Any:
        """Build the function of a run's blocks: (x, stored weights, cache window) -> (x, cache window)."""
        layer = self._layer(run)
        attention = layer.spec.attention
        rotary = tables.get((attention.rotary, attention.head_dim))

        def block(x, weights, cache=None):
            return layer.apply({"params": self._ready(layer, weights)}, x, visibility, rotary, cache)

        return block

    def _run_layers(self, x: Array, visibility: Visibility, tables: dict) -> Array:
        """Run all blocks on whole sequences."""
        for run in self._runs():
            block, weights = self._block(run, visibility, tables), self._weights(_bank_name(run))
            if len(run) == 1:
                x, _ = checkpointed(block, self.remat, in_loop=False)(x, weights)
            else:
                x, _ = jax.lax.scan(checkpointed(block, self.remat, in_loop=True), x, weights)
            # The loss splits positions over tensor. Without this pin behind the loop, and its transpose on the way
            # back, GSPMD carries that split into every block and gathers weights and activations there.
            x = constrain(x, RESIDUAL_NAMES)
        return x

    def _run_cached_layers(
        self, x: Array, visibility: Visibility, tables: dict, cache: KVCache
    ) -> tuple[Array, KVCache]:
        """Run all blocks on new tokens, appending to the cache.

        The banks of the cache are longer than the runs where layers are stored apart: writes into one bank for all
        layers XLA does in place, caches of one layer it would copy at every token.
        """
        keys, values = list(cache.keys), list(cache.values)
        places = [(bank, layer) for bank, entry in enumerate(keys) for layer in range(entry.shape[0])]
        for run in self._runs():
            bank, first = places[run[0]]
            assert places[run[-1]] == (bank, first + len(run) - 1), f"layers {run} lie in several banks of the cache"
            block, weights = self._block(run, visibility, tables), self._weights(_bank_name(run))

            def step(carry, layer, block=block):
                x, bank_keys, bank_values = carry
                index, layer_weights = layer
                x, window = block(x, layer_weights, LayerCache(bank_keys, bank_values, index, cache.index))
                return (x, window.keys, window.values), None

            carry = (x, keys[bank], values[bank])
            if len(run) == 1:
                carry, _ = step(carry, (first, weights))
            else:
                carry, _ = jax.lax.scan(step, carry, (first + jnp.arange(len(run)), weights))
            x, keys[bank], values[bank] = carry
        index = cache.index + x.shape[1]
        return x, cache.replace(keys=tuple(keys), values=tuple(values), index=index)


@functools.lru_cache(maxsize=64)
def _runs(layers: tuple[LayerSpec, ...], scan_layers: bool, bank_layers: int | None) -> tuple[tuple[int, ...], ...]:
    """Group consecutive equal layers, at most `bank_layers` together."""
    if not scan_layers:
        return tuple((index,) for index in range(len(layers)))
    runs: list[tuple[int, ...]] = []
    for _, group in itertools.groupby(range(len(layers)), key=lambda index: layers[index]):
        indices = tuple(group)
        size = bank_layers or len(indices)
        runs.extend(indices[start : start + size] for start in range(0, len(indices), size))
    return tuple(runs)


def _bank_name(run: tuple[int, ...]) -> str:
    return f"layers_{run[0]}" if len(run) == 1 else f"layers_{run[0]}_{run[-1]}"


def _example_input(part: nn.Module) -> tuple[Any, ...]:
    """Give the smallest input that reaches all weights of a part."""
    if isinstance(part, Embedding):
        return (jnp.zeros((1, 1), jnp.int32),)
    x = jnp.zeros((1, 1, part.features), jnp.float32)
    if not isinstance(part, DecoderLayer):
        return (x,)
    attention = part.spec.attention
    tables = (
        rotary_tables(attention.rotary, attention.head_dim, jnp.zeros((1, 1), jnp.int32)) if attention.rotary else None
    )
    return x, causal_visibility(1), tables


def _initial(part: nn.Module, key: Array | None, name: str, layers: tuple[str, ...] | None) -> Any:
    """Draw a part's weights from the key and its logical name; a bank draws each of its layers so."""

    def one(number: Array) -> Any:
        assert key is not None, "Flax asks for initial values only where it has a params key"
        return part.init(jax.random.fold_in(key, number), *_example_input(part))["params"]

    names = layers or (name,)
    numbers = jnp.array([zlib.crc32(layer.encode()) for layer in names], jnp.uint32)
    if layers is None:
        return one(numbers[0])
    stacked = jax.vmap(one)(numbers)
    return jax.tree.map(
        lambda box: box.replace(names=("layers", *box.names)),
        stacked,
        is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned),
    )


@functools.lru_cache(maxsize=64)
def _logical_names(part: nn.Module) -> Any:
    """List the logical names a part's weights declare, as a tree of tuples."""
    boxes = jax.eval_shape(lambda: part.init(jax.random.key(0), *_example_input(part))["params"])
    return jax.tree.map(lambda box: box.names, boxes, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
