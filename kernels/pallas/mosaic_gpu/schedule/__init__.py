"""The tiles and blocks that each program of a Hopper kernel takes, and their order."""
