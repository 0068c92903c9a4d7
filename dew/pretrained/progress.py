"""The bar that shows a load: bytes, rate and time left, in process 0 of a terminal.

Entry point: `showing`.
"""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dew.placement.processes import is_primary
from dew.pretrained.place import ProgressCallback


@contextlib.contextmanager
def showing(
    progress: ProgressCallback | bool | None, title: str, console: Console | None = None
) -> Iterator[ProgressCallback | None]:
    """Make what a load reports its progress to.

    Args:
        progress: A callable is used as it is, in every process. True shows a bar in process 0, None does so where the
            standard error is a terminal, False shows nothing.
        title: Said beside the bar.
        console: Where to draw; None draws on the standard error.

    Yields:
        A callable for `place`, or None.

    Raises:
        TypeError: If `progress` is none of these.
    """
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise TypeError(f"progress must be True, False, None or a callable. Received: progress={progress!r}")
    if progress is None:
        progress = sys.stderr is not None and sys.stderr.isatty()
    if callable(progress):
        yield progress
    elif not progress or not is_primary():
        yield None
    else:
        columns = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
        console = Console(stderr=True) if console is None else console
        with Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=console) as bar:
            task = bar.add_task(title, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
