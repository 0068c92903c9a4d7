"""What a training step asks of the thing it trains.

A loss is a pair (total, mass) that is added over rows, devices, accumulation windows and
evaluation passes and divided once at the end; it is never a mean of means.
Entry points: `Ratio`, `Objective`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np
from flax import linen as nn
from flax import struct

Variables = Mapping[str, Any]
HostBatch = Mapping[str, Any]


@struct.dataclass
class Ratio:
    """A quotient that is not divided yet.

    Attributes:
        total: Weighted sum, a float32 scalar on a device or a float on the host.
        mass: Sum of the weights, not negative and independent of the parameters.
    """

    total: Any
    mass: Any

    def __add__(self, other: Ratio) -> Ratio:
        """Pool two ratios: totals and masses add."""
        return Ratio(self.total + other.total, self.mass + other.mass)

    def value(self) -> float:
        """Divide on the host.

        Returns:
            total / mass; 0.0 where nothing carried any weight.
        """
        mass = float(self.mass)
        return float(self.total) / mass if mass else 0.0

    def read(self) -> Ratio:
        """Copy both numbers to the host, waiting for the device if it is not done.

        Returns:
            The same ratio holding Python floats, which add in double precision.
        """
        total, mass = jax.device_get((self.total, self.mass))
        return Ratio(float(np.asarray(total)), float(np.asarray(mass)))


@struct.dataclass
class LossOutput:
    """What one batch says.

    Attributes:
        loss: The ratio whose gradient is followed.
        metrics: Further ratios to report, by name; "loss" is reserved.
        variables: Replacements of whole collections other than "params", such as batch
            statistics. Empty when nothing changed.
    """

    loss: Ratio
    metrics: dict[str, Ratio] = struct.field(default_factory=dict)
    variables: dict[str, Any] = struct.field(default_factory=dict)


class Objective(Protocol):
    """A module together with the loss it is trained on.

    The methods are pure. `prepare` and `report` run on the host with numpy, the others are
    traced.
    """

    @property
    def module(self) -> nn.Module:
        """The Flax module under training."""
        ...

    def init(self, key: jax.Array) -> Variables:
        """Make fresh variables, with or without logical-axis boxes.

        Args:
            key: Random key.
        """
        ...

    def prepare(self, batch: HostBatch) -> dict[str, Any]:
        """Turn a batch as data sets deliver it into the arrays that `loss` reads.

        Args:
            batch: Host arrays, rows first.
        """
        ...

    def loss(self, variables: Variables, batch: HostBatch, *, key: jax.Array, train: bool) -> LossOutput:
        """Score one prepared batch.

        Args:
            variables: All collections of the module, unboxed.
            batch: What `prepare` returned, placed on the mesh.
            key: Random key of this batch, for dropout and the like.
            train: Whether this is a training step.
        """
        ...

    def report(self, statistics: Mapping[str, Ratio]) -> dict[str, float]:
        """Divide pooled statistics into the numbers a person reads.

        Args:
            statistics: Host ratios by name, "loss" among them.
        """
        ...


def pool(statistics: Mapping[str, Ratio], more: Mapping[str, Ratio]) -> dict[str, Ratio]:
    """Add two sets of statistics name by name.

    Args:
        statistics: Ratios so far; may be empty at the start.
        more: Ratios to add.

    Returns:
        The sums, in the order of `more` where a name is new.
    """
    added = dict(statistics)
    for name, ratio in more.items():
        added[name] = added[name] + ratio if name in added else ratio
    return added
