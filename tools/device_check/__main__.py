"""The parts of the check in their order, and the command that runs them: `python -m tools.device_check`.

Each part prints what it found and ends as ok, FAILED or "not run: reason". On a CPU everything runs on tiny sizes, and
the parts that need a device say so. Exits with 1 where a part failed.
"""

from __future__ import annotations

import argparse
import functools
import sys

import jax

from tools.device_check import attention, machine, products, scans, training
from tools.device_check.parts import BUDGET_SECONDS, FULL, TINY, Part, check

PARTS: dict[str, Part] = {
    "devices": machine.devices,
    "kernels": attention.kernels,
    "blocks": attention.blocks,
    "state-space scan": scans.state_space,
    "delta rule": scans.delta,
    "grouped": products.grouped,
    "int8": functools.partial(products.quantized_products, kind="int8"),
    "fp8": functools.partial(products.quantized_products, kind="fp8"),
    "one device": training.one_device,
    "rejected update": training.rejected_update,
    "kernel speed": attention.kernel_speed,
    "facade": training.facade,
    "host memory": machine.host_memory,
    "collectives": machine.collective_names,
    "load": machine.load,
    "utilisation": training.utilisation,
    "train speed": training.train_speed,
    "decode speed": training.decode_speed,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds after which no part begins")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, as on a CPU")
    options = parser.parse_args(arguments)
    tiny = options.tiny or jax.default_backend() == "cpu"
    results = check({name: PARTS[name] for name in options.parts}, TINY if tiny else FULL, options.budget)
    return int(any(result.startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
