"""`TensorBoard`: the callback of Keras' name for scalars, which needs no TensorFlow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from dew.placement.processes import is_primary
from dew_keras.event_files import EventFile
from dew_keras.optimizers import OptaxHandle


class TensorBoard(keras.callbacks.Callback):
    """Write the logs as event files, in the folders and under the tags of `keras.callbacks.TensorBoard`.

    `train/` gets `epoch_<name>` of every epoch, the learning rate among them, and `batch_<name>` of batches;
    `validation/` gets `epoch_<name>` and `evaluation_<name>_vs_iterations`. Only process 0 writes.

    Args:
        log_dir: The folder.
        write_steps_per_second: Whether to write how many steps a second an epoch, and each recorded batch, made.
        update_freq: "epoch" writes epochs only; "batch" or a number also writes every so many batches, which waits
            for their results.

    Raises:
        ValueError: If `update_freq` is none of these.
    """

    def __init__(
        self, log_dir: Any = "logs", *, write_steps_per_second: bool = False, update_freq: str | int = "epoch"
    ) -> None:
        super().__init__()
        is_number = isinstance(update_freq, int) and not isinstance(update_freq, bool) and update_freq >= 1
        if not is_number and update_freq not in ("epoch", "batch"):
            raise ValueError(
                f"update_freq must be 'epoch', 'batch' or a positive integer. Received: update_freq={update_freq!r}"
            )
        self.log_dir = str(log_dir)
        self.write_steps_per_second = write_steps_per_second
        self.update_freq = 1 if update_freq == "batch" else update_freq
        self._batch = 0
        self._steps_before = 0
        self._batch_start = self._epoch_start = 0.0

    def set_model(self, model: Any) -> None:
        """Begin new files."""
        super().set_model(model)
        self._train = EventFile(Path(self.log_dir) / "train")
        self._validation = EventFile(Path(self.log_dir) / "validation")

    def on_train_begin(self, logs: Any = None) -> None:
        """Count batches from 1."""
        self._batch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Look at the clock."""
        self._epoch_start, self._steps_before = time.perf_counter(), self._batch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Count the batch."""
        self._batch += 1
        self._batch_start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Write the running means, where the batch's turn has come."""
        if self.update_freq == "epoch" or self._batch % int(self.update_freq):
            return
        found = {f"batch_{name}": value for name, value in (logs or {}).items()}
        if self.write_steps_per_second:
            found["batch_steps_per_second"] = 1 / (time.perf_counter() - self._batch_start)
        self._add(self._train, self._batch, found)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the numbers of the epoch."""
        logs = dict(logs or {})
        train = {f"epoch_{name}": value for name, value in logs.items() if not name.startswith("val_")}
        train |= {f"epoch_{name}": value for name, value in _rates(self.model.optimizer).items()}
        if self.write_steps_per_second:
            seconds = time.perf_counter() - self._epoch_start
            train["epoch_steps_per_second"] = (self._batch - self._steps_before) / seconds
        self._add(self._train, epoch, train)
        held_out = {f"epoch_{name[4:]}": value for name, value in logs.items() if name.startswith("val_")}
        self._add(self._validation, epoch, held_out)

    def on_test_end(self, logs: Any = None) -> None:
        """Write what an evaluation found, over the updates made."""
        found = {f"evaluation_{name}_vs_iterations": value for name, value in (logs or {}).items()}
        self._add(self._validation, int(self.model.optimizer.iterations), found)

    def _add(self, file: EventFile, step: int, values: dict[str, Any]) -> None:
        scalars = {name: float(value) for name, value in values.items() if np.ndim(value) == 0}
        if scalars and is_primary():
            file.add(step, scalars)


def _rates(optimizer: Any) -> dict[str, float]:
    """Read the learning rates, as Keras names them."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(optimizer, "optimizers"):
        return {f"learning_rate_{one.name}": float(one.learning_rate) for one in optimizer.optimizers}
    if isinstance(optimizer, OptaxHandle):
        # Only a transformation made with inject_hyperparams shows its rate.
        rate = getattr(optimizer, "learning_rate", None)
        return {} if rate is None else {"learning_rate": float(rate)}
    return {"learning_rate": float(np.asarray(keras.ops.convert_to_numpy(optimizer.learning_rate)))}
