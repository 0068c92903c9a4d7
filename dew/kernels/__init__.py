"""One device's maths, one signature per operation."""
