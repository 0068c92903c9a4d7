"""Text generation as one callable: a checkpoint's model, tokenizer and defaults together.

Entry point: `pipeline`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from dew.data.text import Tokenizer
from dew.inference.decode import generate
from dew.inference.generation_config import sampling_from_config
from dew.inference.requests import Prompts, stop_ids, token_budgets
from dew.inference.sampling import Strategy
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec
from dew.pretrained.load import Pretrained, load_pretrained


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextGeneration:
    """Continue texts, chats or token ids.

    Attributes:
        module: The model.
        variables: Its variables, placed on the mesh.
        tokenizer: Its tokenizer; None for a model that takes ids alone.
        generation_config: The checkpoint's defaults: end tokens, `max_new_tokens`, the draw.
        mesh: Where the variables are.
        layout: Rules to trace under.
    """

    module: Any
    variables: Any
    tokenizer: Tokenizer | None
    mesh: Mesh
    layout: Layout
    generation_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(
        self,
        inputs: Any,
        max_new_tokens: int | None = None,
        *,
        max_length: int | None = None,
        sampling: Strategy | None = None,
        key: int | jax.Array = 0,
        stop_token_ids: Iterable[int] | Literal["auto"] | None = "auto",
        strip_prompt: bool = False,
    ) -> Any:
        """Continue each prompt until a stop token or its limit.

        Args:
            inputs: A string, a chat (a list of role/content messages), a list of token ids, or a list of one of these.
            max_new_tokens: Tokens of an answer; None takes the checkpoint's default, else fills up to 1,024 in all.
            max_length: Tokens of prompt and answer together, instead of `max_new_tokens`.
            sampling: How tokens are drawn; None takes the draw of the checkpoint's generation_config.json.
            key: Seed or PRNG key; the same one draws the same tokens.
            stop_token_ids: Tokens that end an answer; "auto" takes the model's own, [] none.
            strip_prompt: Leave the prompt out of strings and ids.

        Returns:
            The kind that was given: a string with its continuation, a chat's reply, or ids, the stop token included.
            One result for one prompt, a list for a list.

        Raises:
            TypeError: If the inputs are none of these kinds.
            ValueError: If a prompt is empty or too long, or a limit or a stop token does not fit the model.
        """
        prompts = Prompts.of(inputs, self.tokenizer)
        found = generate(
            self.module,
            self.variables,
            prompts.ids,
            max_new_tokens=token_budgets(
                prompts.ids,
                max_length=max_length,
                max_new_tokens=max_new_tokens,
                context=self.module.max_length,
                generation_config=self.generation_config,
            ),
            sampling=sampling_from_config(self.generation_config) if sampling is None else sampling,
            key=key,
            stop_token_ids=stop_ids(stop_token_ids, self.tokenizer, self.generation_config),
            mesh=self.mesh,
            layout=self.layout,
        )
        return prompts.restore(found.tokens, self.tokenizer, strip_prompt=strip_prompt)


def pipeline(
    source: str | Path | Pretrained,
    *,
    mesh: Mesh | MeshSpec | Mapping[str, int] | None = None,
    layout: Layout | None = None,
    dtype: Any = None,
    param_dtype: Any = None,
    revision: str | None = None,
) -> TextGeneration:
    """Load a checkpoint for text generation.

    Args:
        source: A directory, a `.gguf` file, `org/name[@revision]`, `hf://org/name[@revision]`, or what
            `load_pretrained` returned.
        mesh: Mesh, `MeshSpec` or dict of its fields; None puts all devices on data.
        layout: Rules of placement; None takes the defaults.
        dtype: Compute dtype; None takes the checkpoint's, float32 for GGUF.
        param_dtype: Storage dtype of the weights; None keeps what the file holds.
        revision: Branch, tag or commit of a repository.

    Returns:
        A callable on strings, chats and token ids.

    Raises:
        CheckpointError: If the checkpoint is damaged, or is not one this library computes exactly.
        LayoutRefused: If the layout replicates too much or the mesh cannot hold a model.
        ValueError: If a loaded model comes with options that only loading can honour.
    """
    options = {"mesh": mesh, "layout": layout, "dtype": dtype, "param_dtype": param_dtype, "revision": revision}
    if isinstance(source, Pretrained):
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise ValueError(
                f"The model is loaded already, so {', '.join(given)} would change nothing. "
                "Pass the source's name instead, or give these to load_pretrained."
            )
        loaded = source
    else:
        loaded = load_pretrained(source, **options)
    return TextGeneration(
        module=loaded.module,
        variables=loaded.variables,
        tokenizer=loaded.tokenizer,
        generation_config=loaded.generation_config,
        mesh=loaded.mesh,
        layout=loaded.layout,
    )
