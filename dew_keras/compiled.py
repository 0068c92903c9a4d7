"""What `compile` decides, checked at once: optimizer, losses, metrics, accumulation, precision.

Entry points: `resolve_compile`, `Compiled`. Names that mean nothing are refused here, not inside `fit`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from dew.inference.sampling import Greedy, Strategy, Temperature, TopK, TopP, as_sampling
from dew_keras.losses import check_loss_names
from dew_keras.metrics import check_metric_names
from dew_keras.names import unknown_name
from dew_keras.optimizers import CompiledOptimizer, high_rate, resolve_optimizer

LANGUAGE_METRICS = ("perplexity", "token_accuracy")
SAMPLERS: dict[str, type] = {"greedy": Greedy, "random": Temperature, "top_k": TopK, "top_p": TopP}
# Keras' policy names: (dtype that the module computes in, dtype that frozen weights are kept in).
POLICIES: dict[str, tuple[str, str]] = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "mixed_bfloat16": ("bfloat16", "float32"),
    "mixed_float16": ("float16", "float32"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """The settings of a compiled model.

    Attributes:
        optimizer: The optimizer for a mesh.
        loss: "auto", the token cross entropy of a language model, or what Keras takes; None when there is none.
        loss_weights: Factors of several losses.
        metrics: Metrics that ignore sample weights.
        weighted_metrics: Metrics that use them.
        language_metrics: Log keys beside the loss, for a language model with its own loss.
        accumulation: Batches per update.
        sampler: How `generate` draws unless it is told, or None for the checkpoint's own way.
        sequence_length: Positions of a row made from texts; None takes the longest text.
        packing: Whether texts share rows.
        mtp_weight: Weight of further tokens, as `dew.objectives.LanguageModel`.
        is_eager: Whether steps run operation by operation.
        per_execution: Batches per compiled program.
        arguments: What `compile` was given, by name.
    """

    optimizer: CompiledOptimizer
    loss: Any
    loss_weights: Any = None
    metrics: Any = None
    weighted_metrics: Any = None
    language_metrics: tuple[str, ...] = ()
    accumulation: int = 1
    sampler: Strategy | None = None
    sequence_length: int | None = None
    packing: bool = False
    mtp_weight: float | None = None
    is_eager: bool = False
    per_execution: int = 1
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def check_length(self, max_length: int | None) -> None:
        """Refuse rows that are longer than the model reads.

        Args:
            max_length: Most positions of the module; None when it has no such limit.

        Raises:
            ValueError: If `sequence_length` is above it.
        """
        if max_length is not None and (self.sequence_length or 0) > max_length:
            raise ValueError(
                f"The model reads at most {max_length} positions. Received: sequence_length={self.sequence_length}"
            )


def resolve_compile(arguments: Mapping[str, Any], *, is_language_model: bool, is_pretrained: bool) -> Compiled:
    """Check what `compile` was given and resolve what needs no data.

    Args:
        arguments: The arguments by name.
        is_language_model: Whether the module is a language model.
        is_pretrained: Whether its weights come from a checkpoint.

    Returns:
        The settings.

    Raises:
        ValueError: If a name means nothing or an option is not available.
        TypeError: If an argument is of the wrong kind.
    """
    given = dict(arguments)
    is_eager = _is_eager(given["run_eagerly"], given["jit_compile"])
    if given["mesh"] == "auto":
        raise ValueError(
            "mesh='auto' is not available. Give a dict such as {'fsdp': 4, 'tensor': 2}, a MeshSpec, or None for all "
            "devices on data."
        )
    optimizer = resolve_optimizer(
        given["optimizer"],
        is_language_model=is_language_model,
        is_pretrained=is_pretrained,
        scales_loss=bool(given["auto_scale_loss"]) and resolve_policy(given["dtype"])[0] == "float16",
    )
    if is_pretrained and (rate := high_rate(optimizer)) is not None:
        warnings.warn(
            f"A learning rate of {rate:g} is high for pretrained weights and may undo them; the default is 2e-5. "
            "Pass optimizer=keras.optimizers.AdamW(2e-5), or go on if this is meant.",
            stacklevel=3,
        )
    is_token_loss = is_language_model and given["loss"] == "auto"
    loss = given["loss"] if is_language_model or given["loss"] != "auto" else None
    metrics, weighted = given["metrics"], given["weighted_metrics"]
    weighted = None if isinstance(weighted, str) and weighted == "auto" else weighted
    language_metrics: tuple[str, ...] = ()
    if is_token_loss:
        if given["loss_weights"] is not None:
            raise ValueError(
                "loss_weights are factors of several losses; loss='auto' is one, the token cross entropy. "
                f"Received: loss_weights={given['loss_weights']!r}"
            )
        language_metrics = _language_metrics(metrics, weighted, is_auto=given["weighted_metrics"] == "auto")
    else:
        if is_language_model and isinstance(loss, str) and loss.lower().endswith("crossentropy"):
            raise ValueError(
                f"{loss!r} by name reads outputs as probabilities, and a language model gives logits. Use "
                "loss='auto', or keras.losses.SparseCategoricalCrossentropy(from_logits=True)."
            )
        check_loss_names(loss)
        check_metric_names(metrics, "metrics")
        check_metric_names(weighted, "weighted_metrics")
    return Compiled(
        optimizer=optimizer,
        loss=loss,
        loss_weights=given["loss_weights"],
        metrics=metrics,
        weighted_metrics=weighted,
        language_metrics=language_metrics,
        accumulation=_accumulation(given["accumulation"], optimizer.accumulation),
        sampler=None if given["sampler"] == "auto" else resolve_sampler(given["sampler"]),
        sequence_length=_sequence_length(given["sequence_length"]),
        packing=_packing(given["packing"]),
        mtp_weight=given["mtp_weight"],
        is_eager=is_eager,
        per_execution=_count("steps_per_execution", given["steps_per_execution"]),
        arguments=given,
    )


def resolve_sampler(sampler: Any) -> Strategy:
    """Turn a sampler's name or strategy into a strategy.

    Args:
        sampler: "greedy", "random", "top_k", "top_p", or a strategy of `dew.inference`.

    Raises:
        ValueError: If a name means nothing.
        TypeError: If it is no strategy.
    """
    if isinstance(sampler, str):
        if sampler.lower() not in SAMPLERS:
            raise unknown_name("sampler", sampler, SAMPLERS)
        return SAMPLERS[sampler.lower()]()
    as_sampling(sampler)
    return sampler


def resolve_policy(dtype: Any) -> tuple[str | None, str | None]:
    """Turn a dtype policy into compute and storage dtypes.

    Args:
        dtype: "auto" (the checkpoint's dtype, or what the module says), or a Keras policy or its name.

    Returns:
        The two dtypes; None means the checkpoint's, or the module's own.

    Raises:
        ValueError: If the name is unknown.
    """
    name = getattr(dtype, "name", dtype)
    if name in ("auto", None):
        return None, None
    if name not in POLICIES:
        raise unknown_name("dtype", str(name), ["auto", *POLICIES])
    return POLICIES[name]


def _is_eager(run_eagerly: Any, jit_compile: Any) -> bool:
    if jit_compile not in ("auto", True, False):
        raise ValueError(f"jit_compile must be 'auto', True or False. Received: jit_compile={jit_compile!r}")
    if run_eagerly and jit_compile is True:
        warnings.warn(
            "run_eagerly=True runs operation by operation, so jit_compile=True has no effect. Leave one of them out.",
            stacklevel=4,
        )
    return bool(run_eagerly) or jit_compile is False


def _language_metrics(metrics: Any, weighted: Any, *, is_auto: bool) -> tuple[str, ...]:
    for argument, value in (("metrics", metrics), ("weighted_metrics", weighted)):
        if value is not None and not isinstance(value, list | tuple):
            raise ValueError(f"Expected `{argument}` argument to be a list or tuple. Received: {argument}={value!r}")
    if not metrics and not weighted:
        return LANGUAGE_METRICS if is_auto else ()
    found = []
    for item in [*(metrics or ()), *(weighted or ())]:
        name = "token_accuracy" if item in ("accuracy", "acc") else item
        if name not in LANGUAGE_METRICS:
            if isinstance(item, str):
                raise unknown_name("metric", item, [*LANGUAGE_METRICS, "accuracy"])
            raise ValueError(
                "Beside loss='auto' a language model reports 'perplexity' and 'token_accuracy'. For Keras metrics give "
                f"a Keras loss too, such as SparseCategoricalCrossentropy(from_logits=True). Received: metric={item!r}"
            )
        found.append(name)
    return tuple(dict.fromkeys(found))


def _accumulation(given: Any, of_optimizer: int) -> int:
    given = _count("accumulation", given)
    if given > 1 and of_optimizer > 1:
        raise ValueError(
            f"Give either compile(accumulation={given}) or the optimizer's "
            f"gradient_accumulation_steps={of_optimizer}, not both."
        )
    return max(given, of_optimizer)


def _count(name: str, given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"{name} must be a positive integer. Received: {name}={given!r}")
    return given


def _sequence_length(given: Any) -> int | None:
    return None if given is None else _count("sequence_length", given)


def _packing(given: Any) -> bool:
    if not isinstance(given, bool):
        raise ValueError(f"packing must be True or False. Received: packing={given!r}")
    return given
