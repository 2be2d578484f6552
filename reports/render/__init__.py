"""Renderings: one module for each form of a report."""
