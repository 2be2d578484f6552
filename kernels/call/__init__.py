"""The checked call: its record, and one module of checks for each kind of argument (clause S20)."""
