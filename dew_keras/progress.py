"""Where a running fit is in its data, so that a saved run goes on with the next batch.

Entry points: `Progress`, which the loop moves on, and `Cursor`, which a file gives back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dew.objectives.base import Ratio
from dew.tree import named_leaves
from dew_keras.callbacks import Logs
from dew_keras.pooling import FED_ROWS, MetricSum
from dew_keras.weights_file import DamagedFileError

if TYPE_CHECKING:
    from dew_keras.inputs import Source


# Names what metric objects held; the key of their rows is empty, which no array may be called.
FED_NAME = "*"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cursor:
    """Where a fit was when it was saved.

    Attributes:
        title: The file, for messages.
        epoch: Number of the epoch, from 0.
        batch: Batches of it that were consumed.
        first: Number of the epoch in which the fit read its first batch, before any resume.
        order: What decided which rows each batch held.
        sums: Sums behind the running logs of the epoch, by name.
        carry: Metric variables of a step of the user's own.
    """

    title: str
    epoch: int
    batch: int
    first: int
    order: Mapping[str, int | None]
    sums: Mapping[str, Any]
    carry: tuple[np.ndarray, ...] = ()


class Progress:
    """The position of one fit.

    Args:
        offered: Where the weights were saved that were loaded before this fit, or None.

    Attributes:
        epoch: Number of the epoch, from 0.
        batch: Batches of it that were consumed.
        first: Number of the epoch in which the uninterrupted run reads its first batch.
        order: What decides which rows each batch holds.
        is_begun: Whether the first epoch was chosen.
        offered: As given, until another file is loaded.
    """

    def __init__(self, offered: Cursor | None = None) -> None:
        self.epoch = self.batch = self.first = 0
        self.order: Mapping[str, int | None] = {}
        self.is_begun = False
        self.offered = offered
        self._loaded: Cursor | None = None
        self._running: Logs | None = None
        self._sums: Mapping[str, Any] = {}
        self._carry: tuple[np.ndarray, ...] = ()

    def take(self, cursor: Cursor | None) -> None:
        """Go on where a file was saved, when it is loaded while the fit begins; later loads move no data.

        Args:
            cursor: Where, or None.
        """
        if not self.is_begun:
            self._loaded, self.offered = cursor, None

    def begin(self, source: Source, first: int, initial_epoch: int) -> int:
        """Choose where to begin.

        A file that a callback loaded when training began decides. One that was loaded before the fit is gone on with
        where the fit begins in its epoch and reads the same batches.

        Args:
            source: The training data.
            first: The epoch to begin with when no file says otherwise.
            initial_epoch: The epoch in which a run that no file goes on with begins.

        Returns:
            The epoch to begin with.

        Raises:
            ValueError: If the file was saved inside an epoch of other batches.
        """
        self.order, self.is_begun, self.epoch = dict(source.order), True, first
        cursor = self._loaded
        if cursor is not None:
            seed = cursor.order.get("seed")
            if seed is not None and self.order.get("seed") is not None:
                source.reseed(seed)
                self.order = dict(source.order)
            self._check(cursor)
        elif self.offered is not None and (self.offered.epoch, self.offered.order) == (first, self.order):
            cursor = self.offered
        self.first = initial_epoch if cursor is None else cursor.first
        if cursor is not None:
            source.pass_over(max(0, cursor.epoch - cursor.first))
            self.epoch, self.batch, self._sums = cursor.epoch, cursor.batch, cursor.sums
            self._carry = cursor.carry if cursor.batch else ()
        return self.epoch

    def _check(self, cursor: Cursor) -> None:
        if not cursor.batch or cursor.order == self.order:
            return
        names = sorted({*cursor.order, *self.order})
        different = [
            f"{name}={cursor.order.get(name)} (now {self.order.get(name)})"
            for name in names
            if cursor.order.get(name) != self.order.get(name)
        ]
        raise ValueError(
            f"{cursor.title} was saved in epoch {cursor.epoch + 1} after batch {cursor.batch} of a fit with "
            f"{', '.join(different)}. Give fit() the same data and arguments, or delete the file to start anew."
        )

    def begin_epoch(self, logs: Logs) -> Logs:
        """Note the logs of the epoch that begins, after what was consumed of it before.

        Args:
            logs: Its logs, still empty.

        Returns:
            The same logs.
        """
        logs.start_with(self._sums)
        self._running, self._sums = logs, {}
        return logs

    def carry(self, fresh: list[jax.Array]) -> list[jax.Array]:
        """Return the metric variables that a step of the user's own begins the epoch with.

        Args:
            fresh: Those of an epoch from its start.

        Raises:
            ValueError: If the file was saved with other metrics.
        """
        saved, self._carry = self._carry, ()
        if not saved:
            return fresh
        if [value.shape for value in saved] != [value.shape for value in fresh]:
            raise ValueError(
                f"The epoch was begun with {len(saved)} metric variables that this model does not have. Compile it "
                "with the same metrics."
            )
        return [jnp.asarray(value, like.dtype) for value, like in zip(saved, fresh, strict=True)]

    def sums(self) -> Mapping[str, Any]:
        """Return the sums behind the running logs, waiting for the steps in flight."""
        return self._sums if self._running is None else self._running.sums()

    def finish_epoch(self) -> None:
        """Move on to the next epoch."""
        self.epoch, self.batch, self._running = self.epoch + 1, 0, None


def named_sums(sums: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Write sums as named arrays.

    Args:
        sums: Ratios, metric sums or latest numbers by log key.
    """
    named = {FED_NAME if key == FED_ROWS else key: value for key, value in sums.items()}
    return {name: np.asarray(leaf) for name, leaf in named_leaves(named).items()}


def sums_of(arrays: Mapping[str, np.ndarray], title: str) -> dict[str, Any]:
    """Read what `named_sums` wrote.

    Args:
        arrays: Arrays by name.
        title: The file, for the error.

    Raises:
        DamagedFileError: If a name belongs to no sum.
    """
    found: dict[str, Any] = {}
    for name in arrays:
        key, _, field = name.rpartition("/")
        if field in ("total", "mass") and {f"{key}/total", f"{key}/mass"} <= set(arrays):
            found[key] = Ratio(arrays[f"{key}/total"], arrays[f"{key}/mass"])
        elif key.endswith("/values") and field.isdigit():
            count = sum(other.rpartition("/")[0] == key for other in arrays)
            if not all(f"{key}/{index}" in arrays for index in range(count)):
                raise DamagedFileError(f"{title} is damaged: the sums of {key!r} are not all there.")
            values = tuple(arrays[f"{key}/{index}"] for index in range(count))
            found[key.removesuffix("/values")] = MetricSum(values)
        elif key.endswith("/fed") and field.isdigit():
            fed = found.setdefault(FED_ROWS, {"fed": []})["fed"]
            fed.append(arrays.get(f"{key}/{len(fed)}"))
            if fed[-1] is None:
                raise DamagedFileError(f"{title} is damaged: the metrics of {key!r} are not all there.")
        elif field == "latest":
            found[key] = {"latest": arrays[name]}
        else:
            raise DamagedFileError(f"{title} is damaged: {name!r} is no sum of a log.")
    return found
