"""How tests and the law's table compile: quickly, and keeping no more programs than a process can map.

Entry points: `simulation_flags`, for XLA_FLAGS before JAX starts, and `bound_programs`, between programs.
"""

import gc
import importlib.metadata
import pathlib

MAPPINGS = pathlib.Path("/proc/self/maps")
MOST_MAPPINGS = 20_000
"""Memory mappings of a process that keeps its compiled programs; Linux allows 65,530, and a program takes tens."""


def simulation_flags(devices: int) -> list[str]:
    """Give flags of XLA for programs that take longer to compile than to run, on simulated devices.

    Machine code as it comes, from the compiler's older emitters, takes a third of the time. Partitioning, fusion and
    buffers are decided before and stay as they are.
    """
    flags = [f"--xla_force_host_platform_device_count={devices}", "--xla_backend_optimization_level=0"]
    if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")  # Newer releases stop at flags they do not know.
    return flags


def bound_programs() -> None:
    """Drop the compiled programs of this process where there are many; they are compiled, or read, again."""
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        import jax  # not above: it reads the environment, which the callers of `simulation_flags` set

        jax.clear_caches()
        gc.collect()
