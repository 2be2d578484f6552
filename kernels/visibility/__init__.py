"""The keys that each query row sees: intervals of keys, and the blocks that a block of queries visits."""
