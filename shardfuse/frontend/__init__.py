"""The ways in: fusion definitions, and the cache that runs them."""
