"""One subject on one Case: the call, the measurement against the oracle, and a failure in words."""
