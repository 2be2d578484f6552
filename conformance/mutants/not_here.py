"""The error for a mutant that cannot be scored on this machine."""


class NotHereError(Exception):
    """Raised for a mutant that cannot be scored on this machine; the message says why."""
