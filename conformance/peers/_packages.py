"""The reason why a peer whose package is missing cannot run here."""

from importlib.util import find_spec


def why_not_installed(package: str) -> str | None:
    """Return why a process cannot run kernels of a package, in one clause; None if it is installed."""
    return None if find_spec(package) else f"needs the package {package}, which is not installed"
