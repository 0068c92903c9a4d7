"""Room on a disk before something is written beside what it replaces, and errors that say how much there was.

Entry points: `check_room`, `unwritten`.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

# File formats add headers of a few hundred bytes per array.
OVERHEAD_BYTES = 2**20


def check_room(path: Path, nbytes: int) -> None:
    """Refuse to begin a file or directory for which the disk has no room.

    Args:
        path: Where it is to be; its parent exists.
        nbytes: Bytes of its arrays.

    Raises:
        OSError: If the disk has less than that free.
    """
    if shutil.disk_usage(path.parent).free < nbytes + OVERHEAD_BYTES:
        raise unwritten(path, nbytes, OSError(errno.ENOSPC, "there is no room"))


def unwritten(path: Path, nbytes: int, error: OSError) -> OSError:
    """Build the error for a file or directory that could not be written.

    Args:
        path: Where it was to be.
        nbytes: Bytes of its arrays.
        error: What went wrong.

    Returns:
        An error with the same number.
    """
    free = shutil.disk_usage(path.parent).free
    return OSError(
        error.errno or errno.EIO,
        f"{path} could not be written: {error}. What was there is unchanged. The new one is written beside it, so the "
        f"disk needs {nbytes:,} bytes free; it has {free:,}",
    )
