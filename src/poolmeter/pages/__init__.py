"""Grant, meter and board pages: their layout, and reading and writing them from Python."""
