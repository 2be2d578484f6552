"""What the command `attest` does: reads what is asked, runs it, and turns the answer into an exit status.

0: passed. 1: failed, or was interrupted. 2: what was asked makes no sense, said in one sentence on stderr.
The only file that sees `reports`. Heavy imports wait until a command needs them, and until the process
that runs kernels is settled.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conformance import options
from conformance.options import Asked, Outputs, UsageError, asked
from conformance.process import see_folder, settle

if TYPE_CHECKING:
    from conformance.record import RunRecord
    from conformance.runner import Request

PASSED, FAILED, USAGE = 0, 1, 2

app = typer.Typer(
    help="Decides whether attention kernels are right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    see_folder()
    settle()
    click_error: Any = typer.BadParameter.__bases__[0]  # the UsageError of click, wherever typer keeps it
    try:
        return app(args=arguments, prog_name="attest", standalone_mode=False) or PASSED
    except UsageError as error:
        return _complain(str(error), USAGE)
    except click_error as error:
        return _complain(error.format_message(), USAGE) if error.format_message() else USAGE
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", FAILED)


@app.command()
def gate(
    profile: options.Profile = "quick",
    seed: options.Seed = 0,
    shard: options.Shard = "1/1",
    workers: options.Workers = None,
    timeout: options.Timeout = None,
    expectations: options.Expectations = None,
    baseline: options.Baseline = None,
    json: options.Json = None,
    junit: options.Junit = None,
    markdown: options.Markdown = None,
    html: options.Html = None,
) -> int:
    """Judge every subject that this machine can run."""
    import jax

    from conformance.gate import entrants

    outputs = Outputs(json, junit, markdown, html)
    base = None if baseline is None else _read(baseline)
    found = entrants(jax.default_backend())
    if not found.subjects:
        raise UsageError("there is no subject that this machine can run: see `attest list`")
    options_ = Asked(profile, seed, shard, workers, timeout, expectations)
    return _run(options_.request(dict(found.subjects), found.skipped), outputs, base, found.broken)


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
    json: options.Json = None,
    junit: options.Junit = None,
    markdown: options.Markdown = None,
    html: options.Html = None,
) -> int:
    """Judge one subject, or a part of what it is held to."""
    from conformance.subject import find

    outputs = Outputs(json, junit, markdown, html)
    only, narrowed = options.restriction(feature or (), dtype or (), check or (), examples)
    with asked():
        subjects = {subject: find(subject)}
    options_ = Asked(profile, seed, shard, workers, timeout, expectations)
    return _run(options_.request(subjects, only=only, narrowed=narrowed), outputs)


@app.command()
def replay(
    case: Annotated[str, typer.Argument(help="A JSON file, or the JSON object that a failure prints.")],
    subject: Annotated[str | None, typer.Option(help="Who is asked; a failure's own line says.")] = None,
    check: options.Checks = None,
    workers: Annotated[
        int, typer.Option("-n", "--workers", min=0, max=1, help="0: in this process, for a debugger.")
    ] = 1,
    timeout: options.Timeout = None,
    expectations: options.Expectations = None,
) -> int:
    """Judge one case again and say everything about it."""
    from conformance.failure import explain
    from conformance.replay_request import read_replay_request
    from conformance.runner import replay as judge_again
    from conformance.subject import find

    with asked():
        asked_for = read_replay_request(case, subject, tuple(check or ()))
        subjects = {asked_for.subject: find(asked_for.subject)}
    request = Asked(workers=workers, timeout=timeout, expectations=expectations).request(subjects)
    results = judge_again(request, asked_for.case, asked_for.checks)
    typer.echo("\n\n".join(explain(result) for result in results))
    return FAILED if any(result.verdict.red for result in results) else PASSED


@app.command()
def compare(
    base: Annotated[Path, typer.Argument(help="The record of before.")],
    head: Annotated[Path, typer.Argument(help="The record of after.")],
    markdown: options.Markdown = None,
) -> int:
    """Say what a change of kernels did to the errors; exit 1 if anything became worse."""
    from conformance.screen import console
    from reports.compare import compare_records
    from reports.render.markdown import render_comparison
    from reports.render.terminal import print_comparison

    Outputs(markdown=markdown)
    comparison = compare_records(_read(base), _read(head))
    print_comparison(comparison, console())
    _write(markdown, lambda: render_comparison(comparison))
    return FAILED if comparison.regressed else PASSED


@app.command()
def report(
    record: Annotated[Path, typer.Argument(help="What a run wrote with --json.")],
    junit: options.Junit = None,
    markdown: options.Markdown = None,
    html: options.Html = None,
) -> int:
    """Show a record again, or write it in other forms."""
    outputs = Outputs(junit=junit, markdown=markdown, html=html)
    found = _read(record)
    _write_reports(found, outputs)
    if outputs == Outputs():
        _print(found)
    return PASSED


@app.command()
def merge(
    records: Annotated[list[Path], typer.Argument(help="The records of all shards of one run.")],
    expectations: options.Expectations = None,
    json: options.Json = None,
    junit: options.Junit = None,
    markdown: options.Markdown = None,
    html: options.Html = None,
) -> int:
    """Make one record of the shards of a run, and judge it as a whole."""
    from conformance.expectations import load_expectations
    from conformance.gate import with_policy
    from conformance.record import merge_records

    outputs = Outputs(json, junit, markdown, html)
    with asked():
        known = load_expectations(expectations or ())
        merged = merge_records([_read(path) for path in records])
    return _conclude(with_policy(merged, known), outputs)


@app.command("compile")
def compile_kernels(
    profile: Annotated[str, typer.Option(help="How much is compiled: quick or full.")] = "quick",
    target: Annotated[list[str] | None, typer.Option(help="No other devices; repeatable.")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="No other kernels; repeatable.")] = None,
    feature: options.Features = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="No other head dims; repeatable.")] = None,
    dtype: options.Dtypes = None,
    workers: Annotated[
        int | None,
        typer.Option("-n", "--workers", min=0, show_default="the number of cores", help="Processes."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write every result here.")] = None,
) -> int:
    """Compile every kernel for every device, none of which need be here."""
    # Nothing is run: no process takes an accelerator, or looks for one.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from conformance.compile_matrix import Narrowing, compile_matrix
    from conformance.runner import RequestError
    from conformance.screen import console, interruptible, progress
    from reports.render.compilation import print_matrix

    outputs = Outputs(json)
    only = Narrowing(
        targets=tuple(target or ()),
        kernels=tuple(kernel or ()),
        features=tuple(feature or ()),
        head_dims=tuple(head_dim or ()),
        dtypes=tuple(dtype or ()),
    )
    count = (os.cpu_count() or 1) if workers is None else workers
    try:
        with interruptible(), progress() as watch:
            matrix = compile_matrix(profile, only, count, watch)
    except RequestError as error:
        raise UsageError(str(error)) from error
    _write(outputs.json, lambda: dumps(matrix.to_json(), indent=1) + "\n")
    print_matrix(matrix, console())
    return PASSED if matrix.status == "pass" else FAILED


@app.command("list")
def list_subjects() -> int:
    """Say which subjects there are, what they declare and where they run."""
    from conformance.catalogue import catalogue

    typer.echo(catalogue())
    return PASSED


def _run(
    request: "Request", outputs: Outputs, base: "RunRecord | None" = None, problems: Sequence[str] = ()
) -> int:
    from conformance.gate import with_policy
    from conformance.record_file import write_record
    from conformance.runner import RequestError, run
    from conformance.screen import interruptible, progress
    from conformance.workers import WorkerError

    def save(record: "RunRecord") -> None:
        if outputs.json is not None:
            write_record(record, outputs.json)

    try:
        with interruptible(), progress() as watch:
            found = run(request, watch, save)
    except RequestError as error:
        raise UsageError(str(error)) from error
    except WorkerError as error:
        return _complain(str(error), FAILED)
    found = replace(found, problems=tuple(sorted({*found.problems, *problems})))
    return _conclude(with_policy(found, request.expectations), outputs, base)


def _conclude(record: "RunRecord", outputs: Outputs, base: "RunRecord | None" = None) -> int:
    """Write and print a record; its exit status."""
    if base is not None and record.complete:
        record = _compared(record, base)
    _write_reports(record, outputs)
    _print(record)
    if not record.complete:
        where = f"; what was found until then is in {outputs.json}" if outputs.json else ""
        return _complain(f"{record.note}{where}", FAILED)
    return PASSED if record.status == "pass" else FAILED


def _compared(record: "RunRecord", base: "RunRecord") -> "RunRecord":
    from conformance.screen import console
    from reports.compare import compare_records
    from reports.render.terminal import print_comparison

    comparison = compare_records(base, record)
    print_comparison(comparison, console())
    worse = ("worse than the baseline",) if comparison.regressed else ()
    return replace(record, problems=tuple(sorted({*record.problems, *worse})))


def _write_reports(record: "RunRecord", outputs: Outputs) -> None:
    from conformance.record_file import write_record
    from reports.render import html, junit, markdown

    if outputs.json is not None:
        write_record(record, outputs.json)
    _write(outputs.junit, lambda: junit.render_run(record))
    _write(outputs.markdown, lambda: markdown.render_run(record))
    _write(outputs.html, lambda: html.render_run(record))


def _write(path: Path | None, render: Callable[[], str]) -> None:
    if path is not None:
        path.write_text(render(), encoding="utf-8")


def _print(record: "RunRecord") -> None:
    from conformance.screen import console
    from reports.render.terminal import print_run

    print_run(record, console())


def _read(path: Path) -> "RunRecord":
    from conformance.record_file import read_record

    with asked():
        return read_record(path)


def _complain(sentence: str, status: int) -> int:
    print(f"attest: {sentence}", file=sys.stderr)
    return status
