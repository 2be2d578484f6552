"""One description of which keys each query row sees, and its conversions."""
