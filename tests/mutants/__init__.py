"""Defects planted in the clean kernel of tests/alarms, and how many of them a profile kills."""
