"""The register of devices: what it lists, what the devices lose in worth, and who used whose."""
