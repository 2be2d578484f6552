"""tokamax's own attention tests on our adapter."""
