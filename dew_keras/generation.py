"""`generate` in KerasHub's words: which limits, which end tokens, which draw, on which mesh.

Entry point: `run_generate`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from dew.data.text import Tokenizer
from dew.inference.decode_mesh import decode_mesh, decode_place, move_leaf_by_leaf, stored_axes
from dew.inference.sampling import Strategy
from dew.inference.task import TextGeneration
from dew_keras.compiled import resolve_sampler
from dew_keras.engine import Engine
from dew_keras.interrupts import InterruptGate


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
    mesh: Any,
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
        mesh: As `Model.generate`.
        call: Number of the call, which an absent seed draws from.

    Returns:
        The same kind as `inputs`.

    Raises:
        ValueError: If the module is no language model, or a limit or the mesh does not fit.
        LayoutRefused: If the layout leaves too much whole on the mesh.
    """
    module = engine.module
    if not engine.is_language_model:
        raise ValueError(f"{type(module).__name__} is no language model, so it generates no tokens. Use predict().")
    config: Mapping[str, Any] = {} if engine.preset is None else engine.preset.described.generation_config
    # Numbers of calls are far above the keys that initialisation and training fold in.
    key = jax.random.key(seed) if seed is not None else jax.random.fold_in(jax.random.key(engine.seed), 2**16 + call)
    engine.load(None)
    with _decoding(engine, mesh) as where:
        # The engine alone holds the weights when this ends, so that each one that moves back is freed.
        return TextGeneration(
            module=module,
            variables=engine.variables,
            tokenizer=tokenizer,
            mesh=where,
            layout=engine.layout,
            generation_config=config,
        )(
            inputs,
            max_new_tokens,
            max_length=max_length,
            sampling=_sampler(sampler, engine),
            key=key,
            stop_token_ids=stop_token_ids,
            strip_prompt=strip_prompt,
        )


def _decoding(engine: Engine, wanted: Any) -> contextlib.AbstractContextManager[Mesh]:
    """Have the engine's weights where they can decode: where they are, or moved while the context is entered."""
    if wanted is not None:
        mesh, abstract = decode_mesh(engine.mesh, wanted), engine.abstract_variables()
        places = engine.layout.shardings(mesh, abstract)
        engine.layout.check(mesh, abstract, places, engine.view)
        return _weights_on(engine, mesh, places)
    if stored_axes(engine.variables):
        place = decode_place(engine.mesh, engine.layout, engine.abstract_variables(), engine.view)
        return _weights_on(engine, place.mesh, place.shardings)
    return contextlib.nullcontext(engine.mesh)


@contextlib.contextmanager
def _weights_on(engine: Engine, mesh: Mesh, places: Any) -> Iterator[Mesh]:
    """Hold the engine's weights on another mesh of their devices; leaf by leaf there and back, every bit the same."""
    homes = jax.tree.map(lambda leaf: leaf.sharding, engine.variables)
    with InterruptGate() as gate:
        try:
            move_leaf_by_leaf(lambda: engine.variables, engine.lend_variables, places)
            yield mesh
        finally:
            with gate.hold():
                move_leaf_by_leaf(lambda: engine.variables, engine.lend_variables, homes, frees=True)


def _sampler(sampler: Any, engine: Engine) -> Strategy | None:
    """The draw asked for in the call, else in `compile`; None leaves it to the checkpoint."""
    if sampler is not None:
        return resolve_sampler(sampler)
    return None if engine.compiled is None else engine.compiled.sampler
