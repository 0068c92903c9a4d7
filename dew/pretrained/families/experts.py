"""Config fields and weights of experts that several families share, in both directions.

Entry points: `experts_of`, `router_training_of`, `sparse_layers_of` read; `experts_config`, `router_config`,
`sparse_layers_config` write; `expert_weights` names the weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.moe import ExpertsSpec
from dew.nn.router import RouterSpec, RouterTraining
from dew.pretrained.families.decoder import ACTIVATIONS
from dew.pretrained.families.family import uniform
from dew.pretrained.families.fields import Fields
from dew.pretrained.recipe import MAX_EXPERTS, Weight
from dew.pretrained.source import CheckpointError


def experts_of(
    fields: Fields,
    *,
    count: str,
    width: str,
    default_count: int | None = None,
    default_activation: str = "silu",
    router: RouterSpec,
    **options: Any,
) -> ExpertsSpec:
    """Read the experts of a layer.

    Args:
        fields: The config.
        count: Field of their number.
        width: Field of their hidden width.
        default_count: Their number in a config without the field; None refuses one.
        default_activation: What it is in a config without `hidden_act`.
        router: How they are chosen.
        **options: Further fields of the spec.

    Raises:
        CheckpointError: If the router cannot choose among so many, or they are more than any model has.
    """
    num_experts = fields.count(count) if default_count is None else fields.count(count, default_count)
    if num_experts > MAX_EXPERTS:
        raise CheckpointError(f"{fields.where}: {count}={num_experts}; at most {MAX_EXPERTS} experts are read.")
    activation = fields.choice("hidden_act", ACTIVATIONS, default_activation)
    try:
        return ExpertsSpec(
            num_experts=num_experts,
            features=fields.count(width),
            activation=activation,
            router=router,
            **options,
        )
    except ValueError as error:
        raise CheckpointError(f"{fields.where}: {error}") from None


def router_training_of(fields: Fields, top_k: int, default_coefficient: float = 0.001) -> RouterTraining:
    """Read the weight of the balance loss, which the reference adds only where router logits are put out.

    Its loss is `top_k` where all is even, ours 1, so the coefficient is multiplied by that.

    Args:
        fields: The config.
        top_k: Experts of a token; 0 for a model that has none, and so no loss.
        default_coefficient: What the config class has.
    """
    coefficient = fields.get("router_aux_loss_coef", default_coefficient)
    if type(coefficient) not in (int, float) or not 0 <= coefficient < float("inf"):
        raise CheckpointError(
            f"{fields.where}: router_aux_loss_coef must be a finite number of 0 or more. Received: "
            f"router_aux_loss_coef={coefficient!r}"
        )
    return RouterTraining(balance_loss=coefficient * top_k if fields.flag("output_router_logits", False) else 0.0)


def sparse_layers_of(fields: Fields) -> list[bool]:
    """Read which layers have experts, in the fields of Qwen.

    Raises:
        CheckpointError: If `mlp_only_layers` is not a list of layer numbers.
    """
    count, step = fields.count("num_hidden_layers"), fields.count("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(each) is int and 0 <= each < count for each in dense):
        raise CheckpointError(
            f"{fields.where}: mlp_only_layers must list numbers of the {count} layers. Received: "
            f"mlp_only_layers={str(dense)[:200]}"
        )
    return [index not in dense and (index + 1) % step == 0 for index in range(count)]


def experts_config(
    module: CausalTransformer,
    own: Callable[[ExpertsSpec], Mapping[str, Any]],
    *,
    count: str,
    width: str,
) -> dict[str, Any]:
    """Write what the config states once for the experts of all layers.

    Args:
        module: The model.
        own: Further fields of a layer's experts.
        count: Field of their number.
        width: Field of their hidden width.

    Raises:
        ValueError: If the model has none, or they differ in a field.
    """
    if not module.expert_layers:
        raise ValueError("the config is one of experts, and the model has none")
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    each = [
        {
            count: spec.num_experts,
            width: spec.features,
            "num_experts_per_tok": spec.router.top_k,
            "hidden_act": names[spec.activation],
            **own(spec),
        }
        for spec in module.expert_layers
    ]
    return uniform({name: [values[name] for values in each] for name in each[0]})


def router_config(module: CausalTransformer) -> dict[str, Any]:
    """Write the weight of the balance loss, all that a config has of training; the inverse of `router_training_of`."""
    training = module.router_training
    if not training.balance_loss:
        return {"output_router_logits": False}
    # Fifteen digits undo the rounding of the product.
    coefficient = float(f"{training.balance_loss / module.expert_layers[0].router.top_k:.15g}")
    return {"output_router_logits": True, "router_aux_loss_coef": coefficient}


def sparse_layers_config(module: CausalTransformer) -> dict[str, Any]:
    """Write which layers have experts; the inverse of `sparse_layers_of`."""
    dense = [index for index, layer in enumerate(module.layers) if not has_experts(layer)]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def has_experts(layer: LayerSpec) -> bool:
    """Say whether a block has experts rather than a perceptron."""
    return isinstance(layer.mlp, ExpertsSpec)


def expert_weights(block: str, gate: str, up: str, down: str, *, router: str = "gate.weight") -> tuple[Weight, ...]:
    """Name the router and experts that each are tensors of their own.

    Args:
        block: Beginning of the names, with `{i}`.
        gate: Name of an expert's gate projection; `up` and `down` likewise.
        up: Its up projection.
        down: Its down projection.
        router: Name of the router's projection.
    """
    path = "params/layers_{i}/mlp"
    return (
        Weight(f"{path}/router/kernel", f"{block}.{router}", "E D -> D E"),
        Weight(f"{path}/experts/gate_proj", f"{block}.experts.{{e}}.{gate}.weight", "F D -> D F"),
        Weight(f"{path}/experts/up_proj", f"{block}.experts.{{e}}.{up}.weight", "F D -> D F"),
        Weight(f"{path}/experts/down_proj", f"{block}.experts.{{e}}.{down}.weight", "D F -> F D"),
    )


def shared_weights(block: str, shared: str, gate: str | None = None) -> tuple[Weight, ...]:
    """Name the perceptron that every token reads, and the projection that scales it.

    Args:
        block: Beginning of the names, with `{i}`.
        shared: Name of the perceptron.
        gate: Name of the projection; None for none.
    """
    path = "params/layers_{i}/mlp"
    found = [
        Weight(f"{path}/shared/{name}/kernel", f"{block}.{shared}.{name}.weight", arrangement)
        for name, arrangement in (("gate_proj", "F D -> D F"), ("up_proj", "F D -> D F"), ("down_proj", "D F -> F D"))
    ]
    if gate is not None:
        found.append(Weight(f"{path}/shared_gate/kernel", f"{block}.{gate}.weight", "O D -> D O"))
    return tuple(found)
