"""Subjects of peers that run in environments of their own, whose interpreters the user names in variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attest.conformance.bridge import bridged, version_there
from attest.conformance.subject import Subject

_FILES = Path(__file__).parent / "_elsewhere"
# The folder in which `attest` can be imported.
ATTEST = Path(__file__).absolute().parents[3]


@dataclass(frozen=True)
class Environment:
    """An environment. variable: of its interpreter. needs: the package in it, with its version."""

    variable: str
    needs: str

    def why_not(self) -> str | None:
        """Return why nothing can run there, in one clause; None if its interpreter is named."""
        python = os.environ.get(self.variable)
        if not python:
            return f"needs {self.variable}, the interpreter of an environment with {self.needs}"
        if not Path(python).is_file():
            return f"needs {self.variable} to be an interpreter, got {python!r}"
        return None

    @property
    def distribution(self) -> str:
        """The name on PyPI of the package in it."""
        return self.needs.partition(" ")[0]

    def version(self) -> str:
        """Return the version of the package that is installed there; "" if there is none."""
        return version_there(os.environ.get(self.variable, ""), self.distribution)

    def subject(
        self, name: str, function: str, variables: Mapping[str, str] | None = None, **declared: Any
    ) -> Subject:
        """Return a Subject whose kernel is `function`, a `file.py:function` of the folder _elsewhere."""

        def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
            if missing := self.why_not():
                raise RuntimeError(f"{name} {missing}")
            run = bridged(
                os.environ[self.variable],
                f"{_FILES / function}",
                framework="jax",
                gradient_dtype=declared.get("gradient_dtype", "input"),
                name=name,
                variables=variables,
            )
            return run(query, key, value, **options)

        return Subject(
            name=name,
            distribution=self.distribution,
            version=self.version,
            call=call,
            ready=self.why_not,
            **declared,
        )
