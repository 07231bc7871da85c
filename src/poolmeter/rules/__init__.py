"""Pure rules that several components must agree on: capacity identity, slice state."""
