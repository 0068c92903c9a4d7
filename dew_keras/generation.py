"""`generate` in KerasHub's words: which limits, which end tokens, which draw.

Entry point: `run_generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from dew.data.text import Tokenizer
from dew.inference.sampling import Strategy
from dew.inference.task import TextGeneration
from dew_keras.compiled import resolve_sampler
from dew_keras.engine import Engine


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
    # Numbers of calls are far above the keys that initialisation and training fold in.
    key = jax.random.key(seed) if seed is not None else jax.random.fold_in(jax.random.key(engine.seed), 2**16 + call)
    task = TextGeneration(
        module=module,
        variables=engine.load(None),
        tokenizer=tokenizer,
        mesh=engine.mesh,
        layout=engine.layout,
        generation_config=config,
    )
    return task(
        inputs,
        max_new_tokens,
        max_length=max_length,
        sampling=_sampler(sampler, engine),
        key=key,
        stop_token_ids=stop_token_ids,
        strip_prompt=strip_prompt,
    )


def _sampler(sampler: Any, engine: Engine) -> Strategy | None:
    """The draw asked for in the call, else in `compile`; None leaves it to the checkpoint."""
    if sampler is not None:
        return resolve_sampler(sampler)
    return None if engine.compiled is None else engine.compiled.sampler
