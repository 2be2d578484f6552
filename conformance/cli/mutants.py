"""The command `attest mutants`: how many planted defects a profile finds."""

from pathlib import Path
from typing import Annotated

import typer

from attest.conformance.cli import options
from attest.conformance.cli.options import ClusterOptions, Outputs, UsageError, as_usage_errors
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
        help="clean_kernel, nulls, kernels: those of this package, or judges: defects of oracle, error model"
        " and checks, which the project's tests must notice; repeatable.",
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
Ablate = Annotated[
    str,
    typer.Option(
        metavar="CLASS",
        help="Score the defects of this class of clean_kernel without the cases and sizes made for them.",
    ),
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
    cluster: options.ClusterAddress = None,
    mixed: options.Mixed = False,
    rivals: Rivals = False,
    ablate: Ablate = "",
    json: Json = None,
    kills: Kills = None,
    table: Table = None,
) -> int:
    """Count the planted defects that a profile finds; 1 if one survives, or if a correct rewrite fails.

    A mutant is a correct kernel with one planted defect. Each is judged until the first failure.
    """
    Outputs(json=json, table=table, kills=kills)
    on = ClusterOptions(cluster, mixed)
    if ablate and (group or defect_class or rivals or kills or only):
        raise UsageError(
            "--ablate names the defects to score: give no --group, --class, --only, --rivals or --kills"
        )
    from json import dumps

    from attest.conformance.cli.console import note, print_text
    from attest.conformance.cli.on_cluster import scoring
    from attest.conformance.mutants import table as tables
    from attest.conformance.mutants.choose import chosen, of_class_alone
    from attest.conformance.mutants.clean_score import read_kills, with_kills
    from attest.conformance.mutants.run import rival_scores, score_all
    from attest.conformance.mutants.summary import lost, totals
    from attest.conformance.running.plan import load_profile

    profiles = tuple(profile or ("standard",))
    seeds = tuple(dict.fromkeys((*(seed or (0,)), *(more_seeds or ()))))
    with as_usage_errors():
        for name in profiles:
            load_profile(name)
        groups = tuple(group or ("clean_kernel", "nulls"))
        wanted = of_class_alone(ablate) if ablate else chosen(groups, defect_class or (), only or ())
    with scoring(workers, on, note) as where:
        try:
            found = score_all(
                wanted, profiles, seeds, where, json, lambda *now: note(tables.line(*now)), ablate
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        others = rival_scores(wanted, profiles[0], seeds[0], where) if rivals else ()
    summed = totals(found.scores)
    print_text(tables.text(summed, found.skipped))
    if ablate:
        print_text(tables.lost(ablate, lost(found.scores, read_kills())))
    if table is not None:
        write_text(table, tables.markdown(summed, found.catalogue, others))
    if kills is not None:
        write_text(kills, dumps(with_kills(found.scores), indent=1, sort_keys=True) + "\n")
    wrong = any(each.survived or each.null_killed for each in summed)
    return 1 if wrong or not found.scores else 0
