"""The command `attest mutants`: how many planted defects a profile finds."""

from pathlib import Path
from typing import Annotated

import typer

from attest.conformance.cli.options import Outputs, UsageError, as_usage_errors
from attest.conformance.files import write_text

Profiles = Annotated[
    list[str] | None, typer.Option("--profile", show_default="standard", help="Whose cases; repeatable.")
]
Seeds = Annotated[
    list[int] | None,
    typer.Option("--seed", min=0, show_default="0", help="Of the cases; repeatable, or followed by more."),
]
MoreSeeds = Annotated[
    list[int] | None, typer.Argument(metavar="[SEED ...]", min=0, help="More seeds, after --seed.")
]
Groups = Annotated[
    list[str] | None,
    typer.Option(
        "--group",
        show_default="clean_kernel, nulls",
        help="clean_kernel, nulls, or kernels: those of this package, each judged in processes of its own;"
        " repeatable.",
    ),
]
Classes = Annotated[
    list[str] | None, typer.Option("--class", help="Score defects of this class only; repeatable.")
]
Only = Annotated[list[str] | None, typer.Option(help="Score this mutant only; repeatable.")]
Workers = Annotated[int, typer.Option("-n", "--workers", min=1, help="Processes.")]
Rivals = Annotated[
    bool, typer.Option("--rivals", help="Apply the rules of other test suites to the first profile and seed.")
]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Write all scores here; the scores of an earlier run are not made again."),
]
Kills = Annotated[
    Path | None,
    typer.Option(help="Write here what kills each mutant: kills.json of the project."),
]
Table = Annotated[Path | None, typer.Option("--table", help="Write the tables here, in Markdown.")]


def mutants(
    more_seeds: MoreSeeds = None,
    profile: Profiles = None,
    seed: Seeds = None,
    group: Groups = None,
    defect_class: Classes = None,
    only: Only = None,
    workers: Workers = 1,
    rivals: Rivals = False,
    json: Json = None,
    kills: Kills = None,
    table: Table = None,
) -> int:
    """Count the planted defects that a profile finds; 1 if one survives, or if a correct rewrite fails.

    A mutant is a correct kernel with one planted defect. Each is judged until the first failure.
    """
    Outputs(json=json, table=table, kills=kills)
    from json import dumps

    from attest.conformance.cli.console import note, print_text
    from attest.conformance.mutants import table as tables
    from attest.conformance.mutants.choose import chosen
    from attest.conformance.mutants.clean_score import with_kills
    from attest.conformance.mutants.run import rival_scores, score_all
    from attest.conformance.mutants.summary import totals
    from attest.conformance.running.plan import load_profile

    profiles = tuple(profile or ("standard",))
    seeds = tuple(dict.fromkeys((*(seed or (0,)), *(more_seeds or ()))))
    with as_usage_errors():
        for name in profiles:
            load_profile(name)
        wanted = chosen(tuple(group or ("clean_kernel", "nulls")), defect_class or (), only or ())
    try:
        found = score_all(wanted, profiles, seeds, workers, json, lambda *now: note(tables.line(*now)))
    except ValueError as error:
        raise UsageError(str(error)) from None
    others = rival_scores(wanted, profiles[0], seeds[0], workers) if rivals else ()
    summed = totals(found.scores)
    print_text(tables.text(summed, found.skipped))
    if table is not None:
        write_text(table, tables.markdown(summed, found.catalogue, others))
    if kills is not None:
        write_text(kills, dumps(with_kills(found.scores), indent=1, sort_keys=True) + "\n")
    wrong = any(each.survived or each.null_killed for each in summed)
    return 1 if wrong or not found.scores else 0
