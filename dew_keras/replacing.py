"""Files that change as a whole: written beside their place, and renamed when they are complete.

Entry point: `replacing`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dew.files import check_room, unwritten


@contextlib.contextmanager
def replacing(path: Path, nbytes: int) -> Iterator[Path]:
    """Give a path beside a file, and move it into place when nothing went wrong.

    Args:
        path: The file.
        nbytes: Bytes of the arrays that go into it.

    Yields:
        The path to write.

    Raises:
        OSError: If the disk has no room, or the write fails; the old file is whole and nothing is left beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    check_room(path, nbytes)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".unfinished", dir=path.parent)
    os.close(handle)
    unfinished = Path(name)
    try:
        yield unfinished
        # mkstemp makes private files; the saved one gets the permissions of any other new file.
        mask = os.umask(0)
        os.umask(mask)
        unfinished.chmod(0o666 & ~mask)
        os.replace(unfinished, path)
    except OSError as error:
        raise unwritten(path, nbytes, error) from error
    finally:
        if unfinished.exists():
            # HDF5 keeps a file open that it failed to close: emptied first, it holds no space either.
            os.truncate(unfinished, 0)
            unfinished.unlink()


def check_replaceable(path: Path, *, overwrite: bool) -> None:
    """Refuse to replace what may not be replaced.

    Args:
        path: Where a file is to be written.
        overwrite: Whether an earlier file may be replaced.

    Raises:
        FileExistsError: If a file is there and may not be replaced.
        IsADirectoryError: If a directory is there.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a directory is in the place of the file", str(path))
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists. Pass overwrite=True to replace it, or another path.")
