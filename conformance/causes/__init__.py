"""Causes: the failures of a run grouped by what is probably wrong, each shown as one card."""
