"""The commands of `attest`, and their exit statuses.

0: passed. 1: failed, was interrupted, judged nothing, or could not write its results. 2: the
command line is wrong. Everything but a failed verdict is reported in one sentence on stderr.
Only the commands import `reports`. They import heavy modules themselves, after `settle` has set the
environment of the process.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from attest.conformance.cli import options
from attest.conformance.cli.compare import compare, read_run
from attest.conformance.cli.compile import compile_kernels
from attest.conformance.cli.history import history
from attest.conformance.cli.judging import complained, judge
from attest.conformance.cli.listing import list_subjects
from attest.conformance.cli.matrix import matrix
from attest.conformance.cli.mutants import mutants
from attest.conformance.cli.options import (
    FAILED,
    PASSED,
    USAGE,
    ClusterOptions,
    Outputs,
    RunOptions,
    UsageError,
    as_usage_errors,
)
from attest.conformance.cli.store import query, store_commands
from attest.conformance.cli.tune import tune
from attest.conformance.files import FileError
from attest.conformance.process.settings import WorkerError, hold_streams, see_folder, settle
from attest.conformance.process.signals import Interrupted, interruptible

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
        return complained("interrupted", FAILED)


def _attempt(arguments: Sequence[str]) -> int:
    click_error: Any = typer.BadParameter.__bases__[0]  # the UsageError of click, wherever typer keeps it
    try:
        return app(args=arguments, prog_name="attest", standalone_mode=False) or PASSED
    except UsageError as error:
        return complained(str(error), USAGE)
    except click_error as error:
        return complained(error.format_message(), USAGE) if error.format_message() else USAGE
    except (FileError, WorkerError) as error:
        return complained(str(error), FAILED)
    except OSError as error:  # typer prints its help itself
        return complained(f"{error.filename or 'stdout'}: {error.strerror or error}", FAILED)


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
    cluster: options.ClusterAddress = None,
    mixed: options.Mixed = False,
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
    on = ClusterOptions(cluster, mixed)
    options_ = RunOptions(profile, seed, shard, workers, timeout, expectations, fail_fast, shrink, budget, on)
    request = options_.request(dict(found.subjects), found.skipped, narrowed=narrowed)
    return judge(request, outputs, on, resume, base, found.broken, verbose)


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
    cluster: options.ClusterAddress = None,
    mixed: options.Mixed = False,
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
    on = ClusterOptions(cluster, mixed)
    options_ = RunOptions(profile, seed, shard, workers, timeout, expectations, fail_fast, shrink, budget, on)
    request = options_.request(subjects, only=only, narrowed=narrowed)
    return judge(request, outputs, on, resume, verbose=verbose)


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
        return complained(f"nothing was judged: {replayed.subject} {reason}", FAILED)
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
    from attest.conformance.cli.reporting import report_file

    outputs = Outputs(junit=junit, markdown=markdown, html=html, sarif=sarif)
    outputs.spare(record)
    return report_file(record, outputs, verbose)


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
    from attest.conformance.cli.merging import merge_files

    outputs = Outputs(json, junit, markdown, html, sarif)
    outputs.spare(*records)
    return merge_files(records, expectations or (), outputs, verbose)


app.command()(compare)
app.command()(history)
app.command()(matrix)
app.command("compile")(compile_kernels)
app.command()(tune)
app.command()(mutants)
app.command("list")(list_subjects)
app.add_typer(store_commands, name="store")
app.command()(query)
