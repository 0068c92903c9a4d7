"""What is trained: an objective turns a batch into a total, a mass and metrics."""

from dew.objectives.base import LossOutput, Objective, Ratio
from dew.objectives.language import LanguageModel

__all__ = ["LanguageModel", "LossOutput", "Objective", "Ratio"]
