"""Executors: what runs a planned program."""
