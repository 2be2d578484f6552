"""Which tiles and blocks each program of a Hopper kernel takes, and in which order."""
