"""The inputs of the GitHub action, which its steps get as variables ATTEST_*."""

import glob
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from attest.conformance.ci.workflow import StepError

# In the file of the number of the pull request, and in names of artifacts.
NUMBER = re.compile("[1-9][0-9]{0,9}")
# The files of the results, by the option of attest that writes each.
RESULTS = {"json": "record.json", "junit": "junit.xml", "markdown": "report.md", "html": "report.html"}


@dataclass(frozen=True)
class Inputs:
    """The inputs of one use of the action; action.yml describes each."""

    subjects: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    profile: str = "quick"
    seed: str = "0"
    shard: str = "1/1"
    baseline: str = ""
    expectations: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    title: str = "attest"
    comment: bool = True
    folder: Path = Path("attest-results")
    cache: str = ""

    def command(self) -> list[str]:
        """Return the arguments of the command `attest` that makes the record. Raises StepError."""
        outputs = [word for form in RESULTS for word in (f"--{form}", str(self.file(form)))]
        known = [word for file in self.expectations for word in ("--expectations", file)]
        if self.records:
            return ["merge", *self.records, *known, *outputs]
        wanted = ["--profile", self.profile, "--seed", self.seed, "--shard", self.shard]
        single = len(self.subjects) == 1 and not set(self.subjects[0]) & set("*?[")
        if single:
            return ["check", self.subjects[0], *wanted, *known, *outputs, *self.options]
        for name in self.subjects:
            if ":" in name:
                raise StepError(
                    f"subject: got {name!r} beside others, expected names of `attest list`: give it an entry"
                    " point of the group attest.subjects, or a job of its own"
                )
        named = [word for name in self.subjects for word in ("--subject", name)]
        return ["gate", *named, *wanted, *known, *outputs, *self.options]

    def file(self, form: str) -> Path:
        """Return the file of the results in one form."""
        return self.folder / RESULTS[form]


def read_inputs() -> Inputs:
    """Read the inputs from the environment. Raises StepError."""

    def one(name: str, default: str = "") -> str:
        value = os.environ.get(f"ATTEST_{name}", "").strip()
        if "\n" in value or "\r" in value:
            raise StepError(f"{name.lower()}: got {value!r}, expected one line")
        return value or default

    def words(name: str) -> tuple[str, ...]:
        try:
            return tuple(shlex.split(os.environ.get(f"ATTEST_{name}", "")))
        except ValueError as error:
            raise StepError(f"{name.lower()}: {error}") from error

    patterns = words("RECORDS")
    records = tuple(path for pattern in patterns for path in sorted(glob.glob(pattern)))
    if patterns and not records:
        raise StepError(f"records: no file matches {' '.join(patterns)}: has a shard written its record?")
    return Inputs(
        subjects=words("SUBJECT"),
        records=records,
        profile=one("PROFILE", "quick"),
        seed=one("SEED", "0"),
        shard=one("SHARD", "1/1"),
        baseline=one("BASELINE"),
        expectations=words("EXPECTATIONS"),
        options=words("OPTIONS"),
        title=one("TITLE", "attest"),
        comment=_switch("comment", one("COMMENT", "true")),
        folder=Path(one("FOLDER", "attest-results")),
        cache=one("CACHE_FOLDER"),
    )


def _switch(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise StepError(f"{name}: got {value!r}, expected true or false")
    return value == "true"
