"""Block sizes and launch options: their fields, their tables, and the choice among them."""
