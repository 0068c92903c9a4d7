"""Check on a device what no CPU can check: `python -m tools.device_check`, under ten minutes on one GPU."""
