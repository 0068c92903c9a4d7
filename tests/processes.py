"""Pools of two processes with two simulated devices each, for the tests of what several processes do together."""

import json
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
MARK = "RESULT "


def run_pool(program: str, *arguments: str, timeout: float = 300.0) -> list[str]:
    """Run a program in both processes of a pool.

    Args:
        program: Python text; it calls `dew.placement.initialize`.
        arguments: Its arguments.
        timeout: Seconds to wait for each process.

    Returns:
        What each process printed.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    compilation = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": " ".join([*compilation, "--xla_force_host_platform_device_count=2"]),
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "DEW_PROCESS_COUNT": "2",
    }
    pool = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env=env | {"DEW_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in pool]
    finally:
        for process in pool:
            process.kill()  # one that waits for another that failed
    for process, (_, error) in zip(pool, outputs, strict=True):
        assert process.returncode == 0, error[-4000:]
    return [out for out, _ in outputs]


def results(outputs: list[str]) -> list:
    """Read the JSON that each process printed after `RESULT `, on one line: what libraries print may follow it.

    Args:
        outputs: What `run_pool` returned.
    """
    return [json.loads(output.split(MARK)[1].splitlines()[0]) for output in outputs]
