"""Questions about a bound fusion.  Reads the IR, never writes it."""
