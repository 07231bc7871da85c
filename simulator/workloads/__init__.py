"""Programs that use a simulated card the way people's programs do."""
