"""The command `attest compile`: every kernel for every device, without a device."""

import os
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from attest.conformance.cli import options
from attest.conformance.cli.options import ClusterOptions, Outputs, UsageError
from attest.conformance.files import write_text


def compile_kernels(
    profile: Annotated[str, typer.Option(help="Which configurations to compile: quick or full.")] = "quick",
    target: Annotated[
        list[str] | None, typer.Option(help="Compile for this device only; repeatable.")
    ] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Compile this kernel only; repeatable.")] = None,
    feature: options.Features = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Compile this head dim only; repeatable.")
    ] = None,
    dtype: options.Dtypes = None,
    workers: options.CompileWorkers = None,
    cluster: options.ClusterAddress = None,
    mixed: options.Mixed = False,
    json: Annotated[Path | None, typer.Option("--json", help="Write every result here.")] = None,
) -> int:
    """Cross-compile every kernel for every device; no device is needed."""
    # Nothing runs, so no process needs to take an accelerator or look for one.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    on = ClusterOptions(cluster, mixed)
    on.refuse_workers(workers)
    from attest.conformance.cli.console import show
    from attest.conformance.cli.on_cluster import working
    from attest.conformance.cli.watching import watching
    from attest.conformance.compiling.facts import compile_facts
    from attest.conformance.compiling.matrix import Narrowing, compile_matrix
    from attest.conformance.running.fit import RequestError
    from attest.reports.render.compilation import print_matrix

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
        with watching() as watch, working(count, on, watch.say, compile_facts) as where:
            matrix = compile_matrix(profile, only, where, watch.progress)
    except RequestError as error:
        raise UsageError(str(error)) from error
    if outputs.json is not None:
        write_text(outputs.json, dumps(matrix.to_json(), indent=1) + "\n")
    show(lambda console: print_matrix(matrix, console))
    return 0 if matrix.status == "pass" else 1
