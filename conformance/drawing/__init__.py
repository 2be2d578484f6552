"""The Cases of a run: covering arrays, seeded draws, known bugs and problems of production size."""
