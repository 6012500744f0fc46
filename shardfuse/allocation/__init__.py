"""Allocation domains: unsharded sizes from local tensors, layouts from strides."""
