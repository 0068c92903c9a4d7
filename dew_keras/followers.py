"""What Keras callbacks do in the processes that neither print nor write files: all but process 0.

Entry points: `followers`, `quiet`. Logs are equal in every process, so callbacks that decide something run in all of
them and decide the same; those that only write run in process 0; saving gathers weights and is entered by all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

# Their hooks do nothing but print, write files or send.
WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


class BackupFollower(keras.callbacks.Callback):
    """`BackupAndRestore` in another process: it reads the backup and takes part in saving, but keeps no files.

    Args:
        backup: The callback as the user made it.
    """

    def __init__(self, backup: Any) -> None:
        super().__init__()
        self._backup = backup

    def set_model(self, model: Any) -> None:
        """Give the model to both."""
        super().set_model(model)
        self._backup.set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore weights and epoch from the shared folder."""
        self._backup.on_train_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Take part in the save of an epoch."""
        self._backup._current_epoch, self._backup._last_batch_seen = epoch + 1, 0
        if self._backup.save_freq == "epoch":
            self._save()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take part in the save of a batch."""
        if self._backup._should_save_on_batch(batch):
            self._save()

    def _save(self) -> None:
        self.model.save_weights(self._backup._weights_path, overwrite=True)


def followers(callbacks: list[Any]) -> list[Any]:
    """Return what stands for the callbacks in a process that is not the first.

    Args:
        callbacks: The callbacks as the user gave them.
    """
    acting = [callback for callback in callbacks if not isinstance(callback, WRITERS)]
    return [BackupFollower(c) if isinstance(c, keras.callbacks.BackupAndRestore) else c for c in acting]


@contextlib.contextmanager
def quiet(is_quiet: bool) -> Iterator[None]:
    """Keep what callbacks print through Keras off the screen.

    Args:
        is_quiet: Whether to; otherwise nothing changes.
    """
    was_interactive = keras.config.is_interactive_logging_enabled()
    if not is_quiet or not was_interactive:
        yield
        return
    keras.config.disable_interactive_logging()
    try:
        yield
    finally:
        keras.config.enable_interactive_logging()
