"""The node daemon that promises shares of cards, writes the grants that the hook obeys, and journals every change."""
