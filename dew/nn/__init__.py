"""Layers of the models, their weights declared once and their activations pinned by logical name."""
