"""Measurements: every implementation of a workload in one run, checked against float64.  See ``run.py``."""
