"""The draw that a checkpoint's `generation_config.json` asks for.

Entry point: `sampling_from_config`. Its limits and end tokens are read in `dew.inference.requests`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from dew.inference.sampling import Sampling

NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0, 0.0),
    "typical_p": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "top_h": (),
    "encoder_repetition_penalty": (1, 1.0),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "force_words_ids": (),
    "constraints": (),
    "sequence_bias": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "min_new_tokens": (0,),
    "min_length": (0,),
    "stop_strings": ([],),
    "max_time": (),
    "guidance_scale": (1, 1.0),
    "diversity_penalty": (0, 0.0),
    "dola_layers": (),
    "watermarking_config": (),
}
"""Fields that would change what is generated and are not applied, with the values that switch them off beside None."""


def sampling_from_config(generation_config: Mapping[str, Any] | None) -> Sampling:
    """Read the draw that a checkpoint's `generation_config.json` asks for.

    Fields that would change it and are not applied are named in a warning.

    Args:
        generation_config: The file's fields; None or an empty mapping is greedy, as in transformers.

    Returns:
        Greedy unless `do_sample` is true; then its temperature, top_k (50 when absent, transformers' default), top_p
        and min_p. The repetition penalty in either case.

    Raises:
        ValueError: If a number leaves no distribution to draw from.
    """
    config = dict(generation_config or {})
    ignored = [
        f"{name}={config[name]!r}"
        for name, off in NOT_APPLIED.items()
        if config.get(name) is not None and config[name] not in off
    ]
    if ignored:
        warnings.warn(
            f"The checkpoint's generation_config.json sets {', '.join(ignored)}, which this version does not apply: "
            "answers differ from those of a library that does. Choose the draw yourself to silence this: "
            "sampling=Greedy() or TopP(p=0.9) of dew.inference, sampler= in dew_keras.",
            stacklevel=3,
        )

    def given(name: str, default: Any) -> Any:
        value = config.get(name)
        return default if value is None else value

    penalty = given("repetition_penalty", 1.0)
    if not config.get("do_sample", False):
        return Sampling(temperature=0.0, repetition_penalty=penalty)
    return Sampling(
        temperature=given("temperature", 1.0),
        top_k=given("top_k", 50) or None,  # transformers writes 0 for "keep all"
        top_p=given("top_p", 1.0),
        min_p=given("min_p", 0.0),
        repetition_penalty=penalty,
    )
