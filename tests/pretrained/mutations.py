"""Wrong fields and wrong weights that parity tests must show.

A mutation takes a module and its variables and gives both.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from dew.kernels.expert_mixture import CLAMPED_ALPHA
from dew.nn.attention import AttentionSpec
from dew.nn.embed import EmbeddingSpec, HeadSpec
from dew.nn.gated_delta_net import GatedDeltaNetSpec
from dew.nn.latent_attention import LatentAttentionSpec
from dew.nn.mamba2 import Mamba2Spec
from dew.nn.moe import ExpertsSpec
from dew.placement.stacks import stack_view


def with_layers(module, change, **fields):
    """The model with other layers, and other fields of its own."""
    return module.clone(layers=tuple(change(layer) for layer in module.layers), **fields)


def with_attention(module, change):
    """The model with other attention in every layer; `change` gives the fields from the old spec."""

    def changed(layer):
        if not isinstance(layer.mixer, AttentionSpec | LatentAttentionSpec):
            return layer
        return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **change(layer.mixer)))

    return with_layers(module, changed)


def with_states(module, **fields):
    """The model with other fields in every mixer that has a state."""

    def changed(layer):
        if isinstance(layer.mixer, AttentionSpec):
            return layer
        return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **fields))

    return with_layers(module, changed)


def mixers_changed(kind, part):
    """Decorate a change of the weights of every mixer of a kind, given as a dict to change in place."""

    def decorated(change):
        def mutate(module, variables):
            view = stack_view(module)
            params = view.unstack(variables)["params"]
            for index, layer in enumerate(module.layers):
                if isinstance(layer.mixer, kind):
                    change(params[f"layers_{index}"][part])
            return module, view.stack({"params": params})

        mutate.__name__ = change.__name__
        return mutate

    return decorated


scans_changed = mixers_changed(Mamba2Spec, "mamba")
deltas_changed = mixers_changed(GatedDeltaNetSpec, "linear_attn")
attention_changed = mixers_changed(AttentionSpec, "self_attn")


def with_norms(module, **fields):
    """The model with other fields in every norm of the residual stream."""
    norm = dataclasses.replace(module.norm, **fields)
    return with_layers(module, lambda layer: dataclasses.replace(layer, norm=norm), norm=norm)


def eps_times_ten(module, variables):
    return with_norms(module, eps=10 * module.norm.eps), variables


def norms_swapped(module, variables):
    view = stack_view(module)
    params = view.unstack(variables)["params"]
    for index in range(len(module.layers)):
        layer = params[f"layers_{index}"]
        first = "input_layernorm" if "input_layernorm" in layer else "post_feedforward_layernorm"
        layer[first], layer["post_attention_layernorm"] = layer["post_attention_layernorm"], layer[first]
    return module, view.stack({"params": params})


def outer_norms_swapped(module, variables):
    view = stack_view(module)
    params = view.unstack(variables)["params"]
    names = ("post_attention_layernorm", "post_feedforward_layernorm")
    for index in range(len(module.layers)):
        layer = params[f"layers_{index}"]
        layer[names[0]], layer[names[1]] = layer[names[1]], layer[names[0]]
    return module, view.stack({"params": params})


def head_norms_swapped(module, variables):
    view = stack_view(module)
    params = view.unstack(variables)["params"]
    for index in range(len(module.layers)):
        attention = params[f"layers_{index}"]["self_attn"]
        attention["q_norm"], attention["k_norm"] = attention["k_norm"], attention["q_norm"]
    return module, view.stack({"params": params})


def norms_in_front(module, variables):
    view, moved = stack_view(module), with_layers(module, lambda layer: dataclasses.replace(layer, placement="pre"))
    params = view.unstack(variables)["params"]
    for index in range(len(module.layers)):
        layer = params[f"layers_{index}"]
        layer["input_layernorm"] = layer.pop("post_attention_layernorm")
        layer["post_attention_layernorm"] = layer.pop("post_feedforward_layernorm")
    return moved, stack_view(moved).stack({"params": params})


def scales_of_the_first_head(module, variables):
    width = module.layers[0].attention.head_dim

    def repeated(path, leaf):
        if "q_norm" not in str(path) and "k_norm" not in str(path):
            return leaf
        return jnp.tile(leaf[..., :width], leaf.shape[-1] // width)

    return module, jax.tree_util.tree_map_with_path(repeated, variables)


def each_head_normalised(module, variables):
    """Normalises each head alone, with the scales of the first one."""
    width = module.layers[0].attention.head_dim

    def shortened(path, leaf):
        return leaf[..., :width] if "q_norm" in str(path) or "k_norm" in str(path) else leaf

    apart = with_attention(module, lambda spec: {"qk_norm_over": "head"})
    return apart, jax.tree_util.tree_map_with_path(shortened, variables)


def scaled_by_the_width(module, variables):
    mixers = (layer.mixer for layer in module.layers)
    spec = next(spec for spec in mixers if isinstance(spec, AttentionSpec | LatentAttentionSpec))
    heads = getattr(spec, "num_kv_heads", spec.num_heads)
    return with_attention(module, lambda spec: {"scale": (module.features / heads) ** -0.5}), variables


def scaled_by_the_head(module, variables):
    return with_attention(module, lambda spec: {"scale": None}), variables


def tied_to_the_table(module, variables):
    return module.clone(tie_embeddings=True), variables


def window_one_longer(module, variables):
    return with_attention(module, lambda spec: {"window": spec.window and spec.window + 1}), variables


def window_one_shorter(module, variables):
    return with_attention(module, lambda spec: {"window": spec.window and spec.window - 1}), variables


def stored_for(other, module, variables):
    """A model whose layers have become equal, or different, with the variables in its own banks."""
    return other, stack_view(other).stack(stack_view(module).unstack(variables))


def windows_everywhere(module, variables):
    return stored_for(with_attention(module, lambda spec: {"window": 8}), module, variables)


def full_residuals(module, variables):
    return with_layers(module, lambda layer: dataclasses.replace(layer, residual_scale=1.0)), variables


def biases_dropped(module, variables):
    def zeroed(path, leaf):
        return jnp.zeros_like(leaf) if path[-1].key == "bias" else leaf

    return module, jax.tree_util.tree_map_with_path(zeroed, variables)


def unbounded_attention(module, variables):
    return with_attention(module, lambda spec: {"softcap": None}), variables


def unbounded_logits(module, variables):
    return module.clone(head=HeadSpec()), variables


def unscaled_embeddings(module, variables):
    return module.clone(embedding=EmbeddingSpec()), variables


def scales_without_their_one(module, variables):
    return with_norms(module, offset=0.0), variables


def one_after_the_other(module, variables):
    view, after = stack_view(module), with_layers(module, lambda layer: dataclasses.replace(layer, placement="pre"))
    params = view.unstack(variables)["params"]
    for index in range(len(module.layers)):
        layer = params[f"layers_{index}"]
        layer.setdefault("post_attention_layernorm", layer["input_layernorm"])
    return after, stack_view(after).stack({"params": params})


def attention_not_scaled_by_depth(module, variables):
    return stored_for(with_attention(module, lambda spec: {"scale": None}), module, variables)


def unscaled_attention(module, variables):
    return stored_for(with_attention(module, lambda spec: {"scale": 1.0}), module, variables)


def positions_one_later(module, variables):
    def rolled(path, leaf):
        return jnp.roll(leaf, 1, axis=0) if "embed_positions" in str(path) else leaf

    return module, jax.tree_util.tree_map_with_path(rolled, variables)


def norms_of_the_mean_square(module, variables):
    return with_norms(module, kind="rms"), variables


def unscaled_logits(module, variables):
    return module.clone(head=HeadSpec()), variables


def keys_and_values_swapped(module, variables):
    view = stack_view(module)
    params = view.unstack(variables)["params"]
    for index in range(len(module.layers)):
        attention = params[f"layers_{index}"]["self_attn"]
        attention["k_proj"], attention["v_proj"] = attention["v_proj"], attention["k_proj"]
    return module, view.stack({"params": params})


def gates_swapped(module, variables):
    view = stack_view(module)
    params = view.unstack(variables)["params"]
    for index in range(len(module.layers)):
        mlp = params[f"layers_{index}"]["mlp"]
        mlp["gate_proj"], mlp["up_proj"] = mlp["up_proj"], mlp["gate_proj"]
    return module, view.stack({"params": params})


def scans_normalised_together(module, variables):
    return with_states(module, norm_groups=1), variables


def another_eps_of_scans(module, variables):
    return with_states(module, norm_eps=1e-3), variables


def unbounded_steps(module, variables):
    return with_states(module, step_limits=(0.0, math.inf)), variables


@scans_changed
def written_and_read_swapped(mamba):
    for kind in ("proj", "conv"):
        mamba[f"b_{kind}"], mamba[f"c_{kind}"] = mamba[f"c_{kind}"], mamba[f"b_{kind}"]


@scans_changed
def gate_and_values_swapped(mamba):
    mamba["gate_proj"], mamba["x_proj"] = mamba["x_proj"], mamba["gate_proj"]


@scans_changed
def taps_reversed(mamba):
    for name in ("x_conv", "b_conv", "c_conv"):
        mamba[name] = mamba[name] | {"kernel": mamba[name]["kernel"][..., ::-1]}


@scans_changed
def skips_dropped(mamba):
    mamba["D"] = 0 * mamba["D"]


@scans_changed
def decays_doubled(mamba):
    mamba["A_log"] = mamba["A_log"] + math.log(2)


@scans_changed
def scales_of_scans_dropped(mamba):
    mamba["norm_scale"] = 0 * mamba["norm_scale"] + 1


def swapped(weights, first, second):
    weights[first], weights[second] = weights[second], weights[first]


@deltas_changed
def delta_keys_and_queries_swapped(delta):
    swapped(delta, "q_proj", "k_proj")


@deltas_changed
def delta_values_and_gates_swapped(delta):
    swapped(delta, "v_proj", "gate_proj")


@deltas_changed
def delta_corrections_and_decays_swapped(delta):
    swapped(delta, "beta_proj", "decay_proj")


@deltas_changed
def delta_projections_not_grouped_by_key(delta):
    names = ("q_proj", "k_proj", "v_proj", "gate_proj")
    shapes = [delta[name]["kernel"].shape for name in names]
    rows = jnp.concatenate([delta[name]["kernel"] for name in names], axis=2).reshape(shapes[0][0], -1)
    for name, shape in zip(names, shapes, strict=True):
        delta[name] = {"kernel": rows[:, : math.prod(shape[1:])].reshape(shape)}
        rows = rows[:, math.prod(shape[1:]) :]


@deltas_changed
def delta_projections_grouped_by_key(delta):
    names = ("q_proj", "k_proj", "v_proj")
    features, keys, _ = delta["q_proj"]["kernel"].shape
    rows = jnp.concatenate([delta[name]["kernel"].reshape(features, -1) for name in names], axis=1)
    rows = rows.reshape(features, keys, -1)
    for name in names:
        width = delta[name]["kernel"].shape[2]
        delta[name], rows = {"kernel": rows[..., :width]}, rows[..., width:]


@deltas_changed
def delta_taps_reversed(delta):
    for name in ("q_conv", "k_conv", "v_conv"):
        delta[name] = {"kernel": delta[name]["kernel"][..., ::-1]}


@deltas_changed
def delta_decays_doubled(delta):
    delta["A_log"] = delta["A_log"] + math.log(2)


@deltas_changed
def delta_steps_not_shifted(delta):
    delta["dt_bias"] = 0 * delta["dt_bias"]


@deltas_changed
def delta_scales_dropped(delta):
    delta["norm"] = {"scale": 0 * delta["norm"]["scale"] + 1}


@attention_changed
def queries_and_gates_swapped(attention):
    swapped(attention, "q_proj", "gate_proj")


def heads_not_gated(module, variables):
    return with_attention(module, lambda spec: {"gate": False}), variables


def head_norms_without_their_one(module, variables):
    return with_attention(module, lambda spec: {"qk_norm": dataclasses.replace(spec.qk_norm, offset=0.0)}), variables


def with_experts(module, **fields):
    """The model with other fields in every router."""

    def changed(layer):
        if not isinstance(layer.mlp, ExpertsSpec):
            return layer
        router = dataclasses.replace(layer.mlp.router, **fields)
        return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, router=router))

    return with_layers(module, changed)


def with_expert_fields(module, **fields):
    """The model with other fields in every layer of experts."""
    return with_layers(module, lambda layer: dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, **fields)))


def unclamped_experts(module, variables):
    return with_expert_fields(module, limit=1e6), variables


def clamped_a_tenth_later(module, variables):
    return with_expert_fields(module, limit=1.1 * module.expert_layers[0].limit), variables


def another_alpha(module, variables):
    return with_expert_fields(module, alpha=CLAMPED_ALPHA), variables


def expert_biases_dropped(module, variables):
    def zeroed(path, leaf):
        return jnp.zeros_like(leaf) if path[-1].key.endswith("_proj_bias") else leaf

    return module, jax.tree_util.tree_map_with_path(zeroed, variables)


def gates_before_ups(module, variables):
    """Takes the first half of an expert's columns for the gate, not every second."""

    def halved(bank):
        for ending in ("", "_bias"):
            gate, up = bank[f"gate_proj{ending}"], bank[f"up_proj{ending}"]
            columns = jnp.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)
            bank[f"gate_proj{ending}"], bank[f"up_proj{ending}"] = jnp.split(columns, 2, axis=-1)

    view = stack_view(module)
    params = view.unstack(variables)["params"]
    for index in range(len(module.layers)):
        halved(params[f"layers_{index}"]["mlp"]["experts"])
    return module, view.stack({"params": params})


def sinks_dropped(module, variables):
    def emptied(path, leaf):
        return jnp.full_like(leaf, -1e4) if path[-1].key == "sinks" else leaf

    return module, jax.tree_util.tree_map_with_path(emptied, variables)


def weights_not_divided(module, variables):
    return with_experts(module, score="softmax", normalise=False), variables


def weights_divided(module, variables):
    return with_experts(module, normalise=True), variables


def one_expert_more(module, variables):
    return with_experts(module, top_k=module.expert_layers[0].router.top_k + 1), variables


def expert_gates_swapped(module, variables):
    view = stack_view(module)
    params = view.unstack(variables)["params"]
    for index in range(len(module.layers)):
        experts = params[f"layers_{index}"]["mlp"].get("experts", {"gate_proj": 0, "up_proj": 0})
        experts["gate_proj"], experts["up_proj"] = experts["up_proj"], experts["gate_proj"]
    return module, view.stack({"params": params})


def experts_reversed(module, variables):
    def turned(path, leaf):
        # Behind the experts a bank has two dimensions, a bias one.
        return jnp.flip(leaf, -2 if path[-1].key.endswith("_bias") else -3) if "experts" in str(path) else leaf

    return module, jax.tree_util.tree_map_with_path(turned, variables)


def shared_perceptron_ungated(module, variables):
    def opened(path, leaf):
        return jnp.zeros_like(leaf) if "shared_gate" in str(path) else leaf

    return module, jax.tree_util.tree_map_with_path(opened, variables)


def shared_gates_swapped(module, variables):
    view = stack_view(module)
    params = view.unstack(variables)["params"]
    for index in range(len(module.layers)):
        shared = params[f"layers_{index}"]["mlp"]["shared"]
        shared["gate_proj"], shared["up_proj"] = shared["up_proj"], shared["gate_proj"]
    return module, view.stack({"params": params})


def latents_changed(change):
    """A mutation of the weights of every latent attention, given as a dict to change in place."""

    def mutate(module, variables):
        view = stack_view(module)
        params = view.unstack(variables)["params"]
        for index in range(len(module.layers)):
            change(params[f"layers_{index}"]["self_attn"])
        return module, view.stack({"params": params})

    mutate.__name__ = change.__name__
    return mutate


@latents_changed
def latent_scales_dropped(attention):
    attention["kv_a_norm"] = {"scale": jnp.ones_like(attention["kv_a_norm"]["scale"])}


@latents_changed
def query_scales_dropped(attention):
    attention["q_a_norm"] = {"scale": jnp.ones_like(attention["q_a_norm"]["scale"])}


@latents_changed
def shared_key_swapped(attention):
    # The part that turns is read from the beginning of what a token leaves behind.
    attention["kv_a_proj"] = {name: jnp.roll(leaf, 4, axis=-1) for name, leaf in attention["kv_a_proj"].items()}


def latents_of_another_eps(module, variables):
    return with_attention(module, lambda spec: {"norm": dataclasses.replace(spec.norm, eps=1e-2)}), variables


def scaled_by_the_value(module, variables):
    return with_attention(module, lambda spec: {"scale": spec.v_head_dim**-0.5}), variables


def unsharpened_scale(module, variables):
    return with_attention(module, lambda spec: {"scale": spec.qk_head_dim**-0.5}), variables


def any_group(module, variables):
    return with_experts(module, groups=1, top_groups=1), variables


def groups_by_their_best(module, variables):
    return with_experts(module, group_score="max"), variables


def unscaled_experts(module, variables):
    return with_experts(module, scale=1.0), variables


def balance_ignored(module, variables):
    def zeroed(path, leaf):
        return jnp.zeros_like(leaf) if path[-1].key == "balance_bias" else leaf

    return module, jax.tree_util.tree_map_with_path(zeroed, variables)


def shared_perceptron_dropped(module, variables):
    def zeroed(path, leaf):
        return jnp.zeros_like(leaf) if "'shared'" in str(path) else leaf

    return module, jax.tree_util.tree_map_with_path(zeroed, variables)
