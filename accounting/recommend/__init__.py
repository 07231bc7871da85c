"""Right-sizing: rules that propose resizing decisions, and what people and the enforcer make of them."""
