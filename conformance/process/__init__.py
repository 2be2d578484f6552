"""Tasks in processes that can be killed: their settings, phases, signals, time limits and the pool."""
