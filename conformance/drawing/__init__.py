"""Which Cases are posed: covering arrays, seeded draws, known bugs and problems of production size."""
