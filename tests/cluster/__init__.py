"""Runs on the workers of a cluster."""
