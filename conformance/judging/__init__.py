"""One subject on one Case: the call, the measurement against the oracle, and the verdict in words."""
