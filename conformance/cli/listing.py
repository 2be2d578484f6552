"""The command `attest list`: the subjects, where they run and what they declare."""

from typing import Annotated

import typer


def list_subjects(
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show everything that they declare.")
    ] = False,
) -> None:
    """List all subjects and where they run; with -v, what they declare."""
    from attest.conformance.cli import catalogue
    from attest.conformance.cli.console import print_text

    if verbose:
        print_text(catalogue.catalogue())
    else:
        import jax

        print_text(catalogue.short_catalogue(jax.default_backend()))
