"""`generate` in KerasHub's words: which limits, which end tokens, which draw.

Entry point: `run_generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from dew.data.text import Tokenizer
from dew.inference import generate
from dew.inference.sampling import Strategy, sampling_from_config
from dew_keras.compiled import resolve_sampler
from dew_keras.engine import Engine
from dew_keras.text import Prompts, token_budgets


def run_generate(
    engine: Engine,
    tokenizer: Tokenizer | None,
    inputs: Any,
    *,
    max_length: int | None,
    stop_token_ids: Any,
    strip_prompt: bool,
    max_new_tokens: int | None,
    sampler: Any,
    seed: int | None,
    call: int,
) -> Any:
    """Continue prompts.

    Args:
        engine: The model's engine.
        tokenizer: The model's tokenizer, or None.
        inputs: As `Model.generate`.
        max_length: As `Model.generate`.
        stop_token_ids: As `Model.generate`.
        strip_prompt: As `Model.generate`.
        max_new_tokens: As `Model.generate`.
        sampler: As `Model.generate`.
        seed: As `Model.generate`.
        call: Number of the call, which an absent seed draws from.

    Returns:
        The same kind as `inputs`.

    Raises:
        ValueError: If the module is no language model, or a limit does not fit.
    """
    module = engine.module
    if not engine.is_language_model:
        raise ValueError(f"{type(module).__name__} is no language model, so it generates no tokens. Use predict().")
    config: Mapping[str, Any] = {} if engine.preset is None else engine.preset.described.generation_config
    prompts = Prompts.of(inputs, tokenizer)
    budgets = token_budgets(
        prompts.ids,
        max_length=max_length,
        max_new_tokens=max_new_tokens,
        context=module.max_length,
        generation_config=config,
    )
    # Numbers of calls are far above the keys that initialisation and training fold in.
    key = jax.random.key(seed) if seed is not None else jax.random.fold_in(jax.random.key(engine.seed), 2**16 + call)
    found = generate(
        module,
        engine.load(None),
        [list(ids) for ids in prompts.ids],
        max_new_tokens=budgets,
        sampling=_sampler(sampler, engine, config),
        key=key,
        stop_token_ids=_stop_ids(stop_token_ids, tokenizer, config),
        mesh=engine.mesh,
        layout=engine.layout,
    )
    return prompts.restore(found.tokens, tokenizer, strip_prompt=strip_prompt)


def _sampler(sampler: Any, engine: Engine, config: Mapping[str, Any]) -> Strategy:
    if sampler is not None:
        return resolve_sampler(sampler)
    if engine.compiled is not None and engine.compiled.sampler is not None:
        return engine.compiled.sampler
    return sampling_from_config(config)


def _stop_ids(given: Any, tokenizer: Tokenizer | None, config: Mapping[str, Any]) -> tuple[int, ...]:
    if given is None:
        return ()
    if not isinstance(given, str):
        return tuple(int(token) for token in given)
    if given != "auto":
        raise ValueError(f"stop_token_ids must be 'auto', None or a list of ids. Received: stop_token_ids={given!r}")
    found = list(tokenizer.stop_ids) if tokenizer is not None else []
    ends = config.get("eos_token_id")
    found += [] if ends is None else [int(end) for end in (ends if isinstance(ends, list | tuple) else [ends])]
    if not found and tokenizer is None:
        raise ValueError(
            "stop_token_ids='auto' needs a tokenizer or a checkpoint that names its end token. Pass the ids, or [] to "
            "stop at the length alone."
        )
    return tuple(dict.fromkeys(found))
