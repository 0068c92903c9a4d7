"""From what a verb was given to a source of batches for the compiled objective.

Entry point: `Feeder`. Language models take texts, prompts with responses, chats, token rows, or iterables of batches
of these; everything else is x, y and weights.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from typing import Any

import keras

from dew.data.text import Tokenizer
from dew.objectives.language import check_token_ids
from dew.placement.processes import is_primary
from dew_keras.arrays import is_array_tree, keras_arrays, split_rows
from dew_keras.compiled import Compiled
from dew_keras.engine import Engine
from dew_keras.inputs import DEFAULT_BATCH_SIZE, ArraySource, Source
from dew_keras.losses import missing_targets
from dew_keras.names import display_name
from dew_keras.streams import keras_source
from dew_keras.text import LanguageRows, as_keras_batch, is_language_input, is_token_rows, language_stream, make_rows


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Arrays by name that were made already: the rows that `validation_split` cut off."""

    arrays: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Feeder:
    """Makes sources for one model as it is compiled.

    Attributes:
        engine: The model's engine.
        tokenizer: The model's tokenizer, or None.
        compiled: The settings.
    """

    engine: Engine
    tokenizer: Tokenizer | None
    compiled: Compiled

    def training(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        class_weight: Mapping[Any, float] | None,
        *,
        batch_size: int | None,
        shuffle: bool,
        split: float,
    ) -> tuple[Source, Any, list[str]]:
        """Make the source of `fit`.

        Args:
            x: As `fit`.
            y: As `fit`.
            sample_weight: As `fit`.
            class_weight: As `fit`.
            batch_size: As `fit`.
            shuffle: As `fit`.
            split: Part of the rows to cut off for validation.

        Returns:
            The source, the rows cut off in a form that `held_out` takes (or None), and lines that describe the rows.

        Raises:
            ValueError: If the forms do not go together.
        """
        seed = self.engine.seed if shuffle else None
        self._refuse_targets(y)
        if self._takes_language(x, y):
            if sample_weight is not None or class_weight is not None:
                raise ValueError("Token rows are weighed by their loss_mask; leave sample_weight and class_weight out.")
            rows = self._rows(x, None, train=True)
            arrays, cut = self._arrays(rows.arrays, train=True), None
            if split:
                arrays, cut = split_rows(arrays, split)
            return (
                self._source(arrays, batch_size, seed),
                None if cut is None else _Rows(cut),
                [self._described("fit", rows)],
            )
        if self._streams_language(x, y):
            if split:
                raise ValueError(f"validation_split goes with rows, not with a {type(x).__name__}.")
            convert = functools.partial(self._stream_batch, train=True)
            return language_stream(x, convert, sharing=self.engine.sharing, seed=seed), None, []
        cut = None
        self._need_targets(x, y)
        if split:
            if not is_array_tree(x):
                raise ValueError(f"validation_split goes with arrays, not with a {type(x).__name__}.")
            arrays, cut = split_rows(keras_arrays(x, y, sample_weight), split)
            x, y, sample_weight = arrays["x"], arrays.get("y"), arrays.get("sample_weight")
        source = keras_source(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            sharing=self.engine.sharing,
            seed=seed,
            class_weight=class_weight,
        )
        self._note_cost(source)
        return source, None if cut is None else _Rows(cut), []

    def validation(
        self, data: Any, batch_size: int | None, *, inherited: int | None, like: Any
    ) -> tuple[Source, list[str]]:
        """Make the source of a validation.

        Args:
            data: (x, y), (x, y, sample_weight), what x of `fit` may be, or rows that `training` cut off.
            batch_size: Rows of a batch; None is `inherited`.
            inherited: Rows of a training batch, which arrays take; None is 32.
            like: Source of the training rows, whose length texts take.

        Returns:
            The source, and lines that describe the rows.

        Raises:
            ValueError: If the data has another form.
        """
        rows = inherited if batch_size is None else batch_size
        if isinstance(data, _Rows):
            return self._source(data.arrays, rows, None), []
        if isinstance(data, list) and all(hasattr(part, "shape") for part in data):
            data = tuple(data)  # Keras unpacks a list too
        is_tuple = isinstance(data, tuple) and bool(data) and not isinstance(data[0], str)
        if is_tuple and not 1 <= len(data) <= 3:
            raise ValueError(
                "Held-out data must be (x, y), (x, y, sample_weight), or what x may be. "
                f"Received: a tuple of {len(data)}"
            )
        x, y, weight = (*data, None, None)[:3] if is_tuple else (data, None, None)
        takes_rows = is_array_tree(x) or self._takes_language(x, y)
        return self.held_out(x, y, weight, batch_size=rows if takes_rows else batch_size, like=like, what="validation")

    def held_out(
        self, x: Any, y: Any, sample_weight: Any, *, batch_size: int | None, like: Any = None, what: str
    ) -> tuple[Source, list[str]]:
        """Make the source of an evaluation or a validation.

        Args:
            x: As `fit`.
            y: As `fit`.
            sample_weight: As `fit`.
            batch_size: Rows of a batch; None is 32.
            like: Source of the training rows, whose length texts take.
            what: What the data is, for the lines.

        Returns:
            The source, and lines that describe the rows.

        Raises:
            ValueError: If the forms do not go together.
        """
        self._refuse_targets(y)
        if sample_weight is None and self._takes_language(x, y):
            rows = self._rows(x, _row_length(like), train=False)
            return self._source(self._arrays(rows.arrays, train=False), batch_size, None), [self._described(what, rows)]
        if sample_weight is None and self._streams_language(x, y):
            convert = functools.partial(self._stream_batch, train=False)
            return language_stream(x, convert, sharing=self.engine.sharing), []
        self._need_targets(x, y)
        return keras_source(x, y, sample_weight, batch_size=batch_size, sharing=self.engine.sharing), []

    def _source(self, arrays: Mapping[str, Any], batch_size: int | None, seed: int | None) -> ArraySource:
        rows = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
        return ArraySource(arrays, batch_size=rows, sharing=self.engine.sharing, seed=seed)

    @property
    def _has_token_loss(self) -> bool:
        loss = self.compiled.loss
        return self.engine.is_language_model and isinstance(loss, str) and loss == "auto"

    def _refuse_targets(self, y: Any) -> None:
        if y is not None and self._has_token_loss:
            raise ValueError(
                "A language model with loss='auto' is scored on its own next tokens: leave y out, mark what counts in "
                f"a loss_mask, or give compile() a Keras loss. Received: y of type {type(y).__name__}"
            )

    def _note_cost(self, source: Source) -> None:
        """Say where every device computes every batch whole, which is exact and no faster than one device."""
        sharing, rows = self.engine.sharing, getattr(source, "batch_size", 1)
        unit = sharing.round_up(1)
        is_split = sharing.fills or not isinstance(source, ArraySource) or rows > source.rows or rows % unit == 0
        if is_split or not is_primary():
            return
        works = " or ".join(str(size) for size in (rows // unit * unit, sharing.round_up(rows)) if size)
        # On stderr: what fit prints is Keras' own text.
        logging.getLogger("dew_keras").warning(
            "Batches of %d rows do not divide over the %d row shards of the mesh, so every device computes them whole. "
            "batch_size=%s splits them.",
            *(rows, unit, works),
        )

    def _need_targets(self, x: Any, y: Any) -> None:
        loss, own = self.compiled.loss, {"compute_loss", "train_step", "test_step"}
        if y is None and loss is not None and is_array_tree(x) and not own & self.engine.overrides:
            raise missing_targets(str(loss) if isinstance(loss, list | tuple | dict) else display_name(loss))

    def _takes_language(self, x: Any, y: Any) -> bool:
        if not self.engine.is_language_model or y is not None:
            return False
        # The token loss reads nothing else, so what is neither rows nor batches of them is refused as language input.
        return is_language_input(x) or (self._has_token_loss and not self._streams_language(x, y))

    def _streams_language(self, x: Any, y: Any) -> bool:
        if not self.engine.is_language_model or y is not None or isinstance(x, str | bytes | Mapping):
            return False
        if isinstance(x, keras.utils.PyDataset):
            return self._has_token_loss
        if isinstance(x, list | tuple) and self._has_token_loss:
            return bool(x) and not is_language_input(x)
        return hasattr(x, "__iter__") and not is_array_tree(x)

    def _rows(self, inputs: Any, length: int | None, *, train: bool) -> LanguageRows:
        compiled = self.compiled
        return make_rows(
            inputs,
            self.tokenizer,
            length=length if compiled.sequence_length is None else compiled.sequence_length,
            packing=compiled.packing,
            max_length=self.engine.module.max_length,
            fits=functools.partial(self.engine.takes_row_length, train=train),
        )

    def _described(self, what: str, rows: LanguageRows) -> str:
        """Say what became of the texts, and how a mesh cuts the rows."""
        slices, length = self.engine.mesh.shape["sequence"], rows.report.length
        cut = f", rows cut over sequence={slices} into {length // slices} positions each" if slices > 1 else ""
        return f"{what}: {rows.report}{cut}"

    def _arrays(self, arrays: Mapping[str, Any], *, train: bool) -> dict[str, Any]:
        """Token rows for the token cross entropy; inputs and targets for a Keras loss on logits."""
        self.engine.check_row_length(arrays["tokens"].shape[1] - 1, packed="segment_ids" in arrays, train=train)
        if self._has_token_loss:
            return dict(arrays)
        check_token_ids(self.engine.module, arrays["tokens"], positions=arrays["tokens"].shape[1] - 1)
        return as_keras_batch(arrays)

    def _stream_batch(self, item: Any, *, train: bool) -> dict[str, Any]:
        item = item[0] if isinstance(item, tuple) and len(item) == 1 else item
        if not is_language_input(item):
            raise TypeError(
                "A batch for a language model is texts, {'prompts': [...], 'responses': [...]}, chats, an integer "
                "array [rows, T + 1], or a dict of such arrays with 'tokens'. "
                f"Received: a batch of type {type(item).__name__}, {str(item)[:60]}"
            )
        if not is_token_rows(item) and self.compiled.sequence_length is None:
            raise ValueError(
                "Batches of texts need one length: give compile(sequence_length=...). Received: sequence_length=None"
            )
        return self._arrays(self._rows(item, None, train=train).arrays, train=train)


def _row_length(source: Any) -> int | None:
    arrays = getattr(source, "arrays", {})
    if "tokens" in arrays:
        return arrays["tokens"].shape[1] - 1
    x = arrays.get("x")
    return x["tokens"].shape[1] if isinstance(x, Mapping) and "tokens" in x else None
