"""Will it fit: bytes per device of a model on a mesh, before any weight is read."""

from dew.planning.estimate import Estimate, estimate_bytes, planned_mesh
from dew.planning.report import plan_text

__all__ = ["Estimate", "estimate_bytes", "plan_text", "planned_mesh"]
