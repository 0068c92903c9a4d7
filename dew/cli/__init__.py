"""The `dew` command: plan a placement, convert a checkpoint."""
