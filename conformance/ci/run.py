"""The main step of the action: run attest, then report to the summary, the annotations and the outputs."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from attest.conformance.ci.cache import SETTINGS
from attest.conformance.ci.inputs import NUMBER, RESULTS, Inputs
from attest.conformance.ci.workflow import (
    StepError,
    add_summary,
    annotate,
    event,
    no_commands,
    set_outputs,
)

PASSED, FAILED, USAGE = 0, 1, 2
_VERDICTS = {PASSED: "pass", FAILED: "fail"}
WHOLE = "1/1"


def run(inputs: Inputs) -> int:
    """Run attest as the inputs say, report, and return the exit status of the step. Raises StepError."""
    command = inputs.command()
    try:
        inputs.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StepError(f"folder {inputs.folder}: {error.strerror}") from error
    stale = [inputs.file(form) for form in RESULTS]
    for path in (*stale, _comparison(inputs), *_of_comment(inputs)):
        path.unlink(missing_ok=True)  # of an earlier run in the same folder
    status, said = _attest(inputs, command)
    has_record = inputs.file("json").exists()
    if has_record and inputs.baseline and inputs.shard == WHOLE:
        compared = ["compare", inputs.baseline, str(inputs.file("json"))]
        compared_as, said = _attest(inputs, [*compared, "--markdown", str(_comparison(inputs))])
        status = max(status, compared_as)
        if compared_as:
            worse = f"worse than the baseline {inputs.baseline}"
            annotate("error", said if compared_as == USAGE else worse, inputs.title)
    report = _report(inputs)
    commented = _write_comment(inputs, report) if report else False
    if report:
        add_summary(f"## {inputs.title}\n\n{report}")
    set_outputs(
        {
            "verdict": _VERDICTS.get(status, "error"),
            "folder": str(inputs.folder),
            "record": str(inputs.file("json")) if has_record else "",
            "html": str(inputs.file("html")) if inputs.file("html").exists() else "",
            "markdown": str(inputs.file("markdown")) if inputs.file("markdown").exists() else "",
            "comment": str(_of_comment(inputs)[0]) if commented else "",
        }
    )
    if has_record:
        _annotate(inputs)
    elif status:
        annotate("error", said or f"attest ended with status {status} and no record", inputs.title)
    return status


def _attest(inputs: Inputs, arguments: Sequence[str]) -> tuple[int, str]:
    """Run the command; return its exit status, or USAGE if a signal ended it, and its last line on stderr."""
    variables = {"JAX_COMPILATION_CACHE_DIR": inputs.cache, **SETTINGS} if inputs.cache else {}
    print("$ attest", *arguments, flush=True)
    said = ""
    line = [sys.executable, "-P", "-m", "attest", *arguments]
    with (
        no_commands(),
        subprocess.Popen(line, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True) as done,
    ):
        assert done.stderr is not None
        for text in done.stderr:
            sys.stderr.write(text)
            said = text.strip() or said
    return done.returncode if done.returncode in (PASSED, FAILED, USAGE) else USAGE, said


def _comparison(inputs: Inputs) -> Path:
    return inputs.folder / "comparison.md"


def _of_comment(inputs: Inputs) -> tuple[Path, Path]:
    """Return the files that another workflow posts: the text, and the number of the pull request."""
    return inputs.folder / "comment.md", inputs.folder / "pull-request.txt"


def _report(inputs: Inputs) -> str:
    """Return the Markdown of the run, that of the comparison first; empty if there is none."""
    found = [path.read_text() for path in (_comparison(inputs), inputs.file("markdown")) if path.exists()]
    return "\n".join(found)


def _write_comment(inputs: Inputs, report: str) -> bool:
    """Write the comment of a pull request; return whether there is one to write."""
    number = str(event().get("pull_request", {}).get("number", ""))
    if not inputs.comment or inputs.shard != WHOLE or not NUMBER.fullmatch(number):
        return False
    text, pull_request = _of_comment(inputs)
    compared = _comparison(inputs)
    # Either of them fits a comment.
    text.write_text(compared.read_text() if compared.exists() else report)
    pull_request.write_text(f"{number}\n")
    return True


def _annotate(inputs: Inputs) -> None:
    from attest.conformance.ci.annotations import annotations

    for found in annotations(inputs.file("json"), Path(os.environ.get("GITHUB_WORKSPACE", "."))):
        annotate("error", found.message, found.title, found.file, found.line)
