"""Threads for simulated CPU devices.

Entry point: `give_threads`. XLA runs all CPU devices of a process on one pool with a thread for each. A collective
blocks its thread until its peers arrive, and a device may be in several at once, those that do not depend on each
other: a pool of that size can end up waiting as a whole for a device that has no thread left.
"""

import os
import re

THREADS_PER_DEVICE = 8
"""More than the collectives that a training step leaves unordered; a thread without work costs nothing."""


def give_threads() -> None:
    """Let XLA make a pool in which no simulated device waits for a thread.

    Sets the environment variable NPROC, which XLA reads when the first array is made, where XLA_FLAGS simulates several
    devices and NPROC is not set.
    """
    found = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if found and int(found[1]) > 1:
        os.environ.setdefault("NPROC", str(THREADS_PER_DEVICE * int(found[1])))
