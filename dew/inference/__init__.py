"""Generation: prompts in, tokens out, on any mesh that trains."""

from dew.inference.decode import Generation, generate
from dew.inference.sampling import Greedy, Sampling, Temperature, TopK, TopP
from dew.inference.task import TextGeneration, pipeline

__all__ = [
    "Generation",
    "Greedy",
    "Sampling",
    "Temperature",
    "TextGeneration",
    "TopK",
    "TopP",
    "generate",
    "pipeline",
]
