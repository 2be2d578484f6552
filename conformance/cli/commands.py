"""The commands of `attest`, and their exit statuses.

0: passed. 1: failed, was interrupted, judged nothing, or could not write its results. 2: the
command line is wrong. Everything but a failed verdict is reported in one sentence on stderr.
Only the commands import `reports`. They import heavy modules themselves, after `settle` has set the
environment of the process.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attest.conformance.cli import options
from attest.conformance.cli.compare import compare, read_run
from attest.conformance.cli.compile import compile_kernels
from attest.conformance.cli.history import history
from attest.conformance.cli.listing import list_subjects
from attest.conformance.cli.mutants import mutants
from attest.conformance.cli.options import Outputs, RunOptions, UsageError, as_usage_errors
from attest.conformance.cli.store import query, store_commands
from attest.conformance.cli.tune import tune
from attest.conformance.files import FileError, write_text
from attest.conformance.process.settings import WorkerError, hold_streams, see_folder, settle
from attest.conformance.process.signals import Interrupted, interruptible

if TYPE_CHECKING:
    from rich.console import Console

    from attest.conformance.record import Result, RunRecord
    from attest.conformance.records.journal import Journal
    from attest.conformance.running.runner import Request

PASSED, FAILED, USAGE = 0, 1, 2

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    hold_streams()
    settle()
    typed = sys.argv[1:] if arguments is None else arguments
    try:
        with interruptible():
            # Without a command the help is shown, and a script whose command is missing fails.
            return _attempt(typed) if typed else _attempt(["--help"]) or USAGE
    except Interrupted:
        return _complain("interrupted", FAILED)


def _attempt(arguments: Sequence[str]) -> int:
    click_error: Any = typer.BadParameter.__bases__[0]  # the UsageError of click, wherever typer keeps it
    try:
        return app(args=arguments, prog_name="attest", standalone_mode=False) or PASSED
    except UsageError as error:
        return _complain(str(error), USAGE)
    except click_error as error:
        return _complain(error.format_message(), USAGE) if error.format_message() else USAGE
    except (FileError, WorkerError) as error:
        return _complain(str(error), FAILED)
    except OSError as error:  # typer prints its help itself
        return _complain(f"{error.filename or 'stdout'}: {error.strerror or error}", FAILED)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        from attest.conformance.cli.console import print_text

        print_text(f"attest {version('attest-attention')}")
        raise typer.Exit


@app.callback()
def attest(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end."),
    ] = False,
) -> None:
    """Test attention kernels against a float64 oracle. A subject is a kernel with its declarations."""


@app.command()
def gate(
    subject: options.SubjectPatterns = None,
    profile: options.Profile = "quick",
    seed: options.Seed = 0,
    shard: options.Shard = "1/1",
    workers: options.Workers = None,
    timeout: options.Timeout = None,
    expectations: options.Expectations = None,
    fail_fast: options.FailFast = False,
    shrink: options.Shrink = True,
    budget: options.Budget = None,
    resume: options.Resume = None,
    baseline: options.Baseline = None,
    json: options.Json = None,
    junit: options.Junit = None,
    markdown: options.Markdown = None,
    html: options.Html = None,
    sarif: options.Sarif = None,
    verbose: options.Verbose = False,
) -> int:
    """Test every subject that this machine can run."""
    import jax

    from attest.conformance.running.gate import runnable_subjects

    outputs = Outputs(json, junit, markdown, html, sarif)
    outputs.spare(*([] if baseline is None else [baseline]))
    base = None if baseline is None else read_run(baseline)
    with as_usage_errors():
        found = runnable_subjects(jax.default_backend(), tuple(subject or ()))
    if not found.subjects:
        raise UsageError("no subject can run on this machine: see `attest list`")
    narrowed = " ".join(f"--subject {pattern}" for pattern in subject or ())
    options_ = RunOptions(
        profile, seed, shard, workers, timeout, expectations, fail_fast, shrink, budget, resume
    )
    request = options_.request(dict(found.subjects), found.skipped, narrowed=narrowed)
    return _run(request, outputs, base, found.broken, verbose)


@app.command()
def check(
    subject: options.SubjectName,
    feature: options.Features = None,
    dtype: options.Dtypes = None,
    check: options.Checks = None,
    examples: options.Examples = None,
    profile: options.Profile = "quick",
    seed: options.Seed = 0,
    shard: options.Shard = "1/1",
    workers: options.Workers = None,
    timeout: options.Timeout = None,
    expectations: options.Expectations = None,
    fail_fast: options.FailFast = False,
    shrink: options.Shrink = True,
    budget: options.Budget = None,
    resume: options.Resume = None,
    json: options.Json = None,
    junit: options.Junit = None,
    markdown: options.Markdown = None,
    html: options.Html = None,
    sarif: options.Sarif = None,
    verbose: options.Verbose = False,
) -> int:
    """Test one subject, with all checks and cases or with some of them."""
    from attest.conformance.subject import find

    outputs = Outputs(json, junit, markdown, html, sarif)
    only, narrowed = options.restriction(feature or (), dtype or (), check or (), examples)
    see_folder()
    with as_usage_errors():
        subjects = {subject: find(subject)}
    options_ = RunOptions(
        profile, seed, shard, workers, timeout, expectations, fail_fast, shrink, budget, resume
    )
    return _run(options_.request(subjects, only=only, narrowed=narrowed), outputs, verbose=verbose)


@app.command()
def replay(
    case: Annotated[str, typer.Argument(help="A JSON file, or the JSON object that a failure prints.")],
    subject: Annotated[
        str | None, typer.Option(help="The subject to test, in place of the one in the JSON.")
    ] = None,
    check: options.Checks = None,
    allow_import: Annotated[
        bool, typer.Option("--allow-import", help="Import the module that the JSON names as its subject.")
    ] = False,
    workers: Annotated[
        int, typer.Option("-n", "--workers", min=0, max=1, help="0: run in this process, for a debugger.")
    ] = 1,
    timeout: options.Timeout = None,
    expectations: options.Expectations = None,
    picture: Annotated[
        bool, typer.Option("--picture", help="Draw which keys each row sees, and which it should.")
    ] = False,
    script: options.Script = None,
) -> int:
    """Run one case again and print the result in full."""
    from attest.conformance.cli.console import print_text
    from attest.conformance.cli.replay_request import read_replay_request, write_script
    from attest.conformance.judging.failure import explain
    from attest.conformance.record import any_red
    from attest.conformance.running.fit import not_judged
    from attest.conformance.running.runner import drawn_picture
    from attest.conformance.running.runner import replay as judge_again
    from attest.conformance.subject import find

    see_folder()
    with as_usage_errors():
        replayed = read_replay_request(case, subject, tuple(check or ()), allow_import)
        subjects = {replayed.subject: find(replayed.subject)}
        if script is not None:
            write_script(replayed, subjects[replayed.subject], script)
            return PASSED
    request = RunOptions(workers=workers, timeout=timeout, expectations=expectations).request(subjects)
    results = judge_again(request, replayed.case, replayed.checks)
    print_text("\n\n".join(explain(result) for result in results))
    if picture:
        print_text("\n" + drawn_picture(request, replayed.case))
    reason = not_judged(subjects[replayed.subject], results)
    if reason is not None:
        return _complain(f"nothing was judged: {replayed.subject} {reason}", FAILED)
    return FAILED if any_red(results) else PASSED


@app.command()
def report(
    record: Annotated[Path, typer.Argument(help="A file that a run wrote with --json.")],
    junit: options.Junit = None,
    markdown: options.Markdown = None,
    html: options.Html = None,
    sarif: options.Sarif = None,
    verbose: options.Verbose = False,
) -> int:
    """Print a record, or write it as JUnit XML, Markdown, HTML or SARIF."""
    from attest.conformance.cli.console import show
    from attest.reports.render.terminal import print_run

    outputs = Outputs(junit=junit, markdown=markdown, html=html, sarif=sarif)
    outputs.spare(record)
    found = read_run(record)
    faults = _written(found, outputs)
    if faults:
        return _complain("; ".join(faults), FAILED)
    if outputs == Outputs():
        show(lambda console: print_run(found, console, verbose))
    return PASSED


@app.command()
def merge(
    records: Annotated[list[Path], typer.Argument(help="The records of all shards of one run.")],
    expectations: options.Expectations = None,
    json: options.Json = None,
    junit: options.Junit = None,
    markdown: options.Markdown = None,
    html: options.Html = None,
    sarif: options.Sarif = None,
    verbose: options.Verbose = False,
) -> int:
    """Merge the records of a run's shards into one, and apply the rules of a complete run."""
    from attest.conformance.record import merge_records
    from attest.conformance.running.expectations import load_expectations
    from attest.conformance.running.gate import with_policy

    outputs = Outputs(json, junit, markdown, html, sarif)
    outputs.spare(*records)
    with as_usage_errors():
        known = load_expectations(expectations or ())
        merged = merge_records([read_run(path) for path in records])
    return _conclude(with_policy(merged, known), outputs, verbose=verbose)


app.command()(compare)
app.command()(history)
app.command("compile")(compile_kernels)
app.command()(tune)
app.command()(mutants)
app.command("list")(list_subjects)
app.add_typer(store_commands, name="store")
app.command()(query)


def _run(
    request: "Request",
    outputs: Outputs,
    base: "RunRecord | None" = None,
    problems: Sequence[str] = (),
    verbose: bool = False,
) -> int:
    from attest.conformance.cli.watching import watching
    from attest.conformance.record import with_problems
    from attest.conformance.running.fit import RequestError, refuse_unfit
    from attest.conformance.running.gate import with_policy
    from attest.conformance.running.runner import run

    journal = None
    try:
        for subject in request.subjects.values():
            refuse_unfit(subject, request.profile, request.only)
        journal = _begun(request, outputs.json)
        if request.workers == 0 and len(request.subjects) > 1:
            _complain("-n 0 runs all subjects in one process, where one can spoil those after it", PASSED)
        with watching() as watch:

            def keep(results: "Sequence[Result]", judged: str) -> None:
                if journal is not None:
                    journal.add(results, judged)
                watch.results(results)

            found = run(request, watch.progress, keep)
    except RequestError as error:
        if journal is not None:
            journal.remove()
        raise UsageError(str(error)) from error
    found = with_policy(with_problems(found, problems), request.expectations)
    return _conclude(found, outputs, base, journal, verbose)


def _begun(request: "Request", record: Path | None) -> "Journal | None":
    """Begin the journal of a run whose record goes to a file."""
    from attest.conformance.files import is_special
    from attest.conformance.process.limits import limits
    from attest.conformance.records.journal import Journal, journal_path
    from attest.conformance.running.runner import empty_record

    if record is None or is_special(record):
        return None
    before = request.before.calls
    return Journal(journal_path(record), empty_record(request), limits()["sync_seconds"], before)


def _conclude(
    record: "RunRecord",
    outputs: Outputs,
    base: "RunRecord | None" = None,
    journal: "Journal | None" = None,
    verbose: bool = False,
) -> int:
    """Write and print a record; return the exit status. One failed write does not prevent the others."""
    from attest.conformance.cli.console import show
    from attest.conformance.record import with_problems
    from attest.reports.compare import compare_records
    from attest.reports.render.terminal import print_comparison, print_run

    prints: list[Callable[[Console], None]] = [lambda console: print_run(record, console, verbose)]
    if base is not None and record.complete:
        comparison = compare_records(base, record)
        record = with_problems(record, ("worse than the baseline",) if comparison.regressed else ())
        prints.insert(0, lambda console: print_comparison(comparison, console))
    faults = _written(record, outputs)
    if journal is not None and not faults and record.complete:
        journal.remove()
    elif journal is not None:
        journal.close()
        faults += [journal.contents] if faults else []
    try:
        show(*prints)
    except FileError as error:
        faults.append(str(error))
    if not record.complete:
        compared = "" if base is None else "; not compared with the baseline"
        where = f"; the results so far are in {outputs.json}" if outputs.json and not faults else ""
        where += f", and --resume {outputs.json} judges the rest" if where and journal is not None else ""
        faults.insert(0, f"{record.note}{compared}{where}")
    if faults:
        return _complain("; ".join(faults), FAILED)
    if journal is not None and journal.fault:
        _complain(f"{journal.fault}, so the run continued without a journal", FAILED)
    return PASSED if record.status == "pass" else FAILED


def _written(record: "RunRecord", outputs: Outputs) -> list[str]:
    """Write the record in every requested form; return a sentence for each form that could not be written."""
    from attest.conformance.records.record_file import record_text
    from attest.reports.render import html, junit, markdown, sarif

    faults: list[str] = []
    for path, render in (
        (outputs.json, record_text),
        (outputs.junit, junit.render_run),
        (outputs.markdown, markdown.render_run),
        (outputs.html, html.render_run),
        (outputs.sarif, sarif.render_run),
    ):
        if path is not None:
            try:
                write_text(path, render(record))
            except FileError as error:
                faults.append(str(error))
    return faults


def _complain(sentence: str, status: int) -> int:
    from attest.conformance.cli.console import complain

    complain(sentence)
    return status
