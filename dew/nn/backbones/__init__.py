"""Whole models assembled from the layers of `dew.nn`."""
