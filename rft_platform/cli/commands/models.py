"""``rft models``: manage the registered versions of the model, and choose the version that serves traffic.

The commands for serving versions write decisions to the service's database; a running service carries out the decisions
within a second.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from rft_platform.model_registry.models import RegisteredModel
    from rft_platform.online.releases.commands import ReleaseCommands
    from rft_platform.online.releases.store import Release
    from rft_platform.rounds.project.project import Project


models = typer.Typer(no_args_is_help=True, help="Manage versions of the policy: in MLflow, and in production traffic.")


@models.command()
def rollback(
    version: Annotated[
        int | None, typer.Argument(help="Online projects: policy version to serve; by default the one before.")
    ] = None,
) -> None:
    """Make the previous champion the champion again. A repeated call goes further back.

    In an online project, serve another released version; a running canary or A/B test ends.
    """
    from rft_platform.common.errors import UserError
    from rft_platform.config.home import Home
    from rft_platform.jobs.driver_lock import refuse_second_driver
    from rft_platform.online.project import open_project
    from rft_platform.online.releases.versions import release_commands
    from rft_platform.rounds.releases.promotion import roll_back
    from rft_platform.rounds.setup.connections import connect_registry
    from rft_platform.run.console import output

    project = open_project(Home.from_environment())
    if project.traffic is not None:
        served = release_commands(project).roll_back(version)
        return output().print(f"version {served} serves again")
    if version is not None:
        raise UserError("rft models rollback VERSION is for online projects (`rft serve`): leave the version out")
    refuse_second_driver(project.home)
    registry = connect_registry(project)
    replaced = registry.last_promoted()
    champion = roll_back(project, registry)
    line = f"{champion.name}: champion is {_both_versions(champion)} again, instead of {_both_versions(replaced)}"
    return output().print(line, markup=False, soft_wrap=True)


#: Held-out scores in the table of versions, and their formats.
_SCORES = {"sampled_pass": ".1%", "greedy_pass": ".1%", "mean_reward": ".4g"}
Version = Annotated[int, typer.Argument(help="Policy version, as in `rft models list` and in the header of answers.")]
OptionalVersion = Annotated[int | None, typer.Argument(help="Policy version; the newest one if left out.")]
Reason = Annotated[str, typer.Option(help="Why; it is kept with the decision.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@models.command("list")
def list_versions(as_json: Json = False) -> None:
    """List the versions of the policy with their held-out pass rates and their share of the traffic."""
    from rft_platform.online.releases.versions import release_commands, servable_versions
    from rft_platform.run.console import output, print_json

    project = _project()
    if project.traffic is not None:
        status = release_commands(project).status()
    else:
        from dataclasses import asdict

        versions = [asdict(each) for each in servable_versions(project)]
        status = {"versions": versions, "release": None, "pinned": None}
    if as_json:
        print_json(status)
        return
    output().print(_versions_table(status["versions"], _aliases(project), online=project.traffic is not None))
    if status["release"] is not None:
        release = status["release"]
        line = (
            f"{release['kind']} {release['number']}: version {release['candidate_version']} gets {release['share']:.0%}"
        )
        output().print(f"{line}; {release['reason']}", markup=False, soft_wrap=True)
    if status["pinned"] is not None:
        _print(status["pinned"])


@models.command()
def compare(one: Version, other: Version, as_json: Json = False) -> None:
    """Compare the scores of two versions on held-out tasks."""
    from rft_platform.common.errors import UserError
    from rft_platform.online.releases.commands import compare_scores
    from rft_platform.online.releases.versions import servable_versions
    from rft_platform.run.console import output, print_json

    project = _project()
    found = compare_scores(servable_versions(project), one, other)
    if not found["difference"]:
        raise UserError(
            f"versions {one} and {other} have no score in common, so nothing can be compared: `rft eval --all` "
            "evaluates every version on the held-out tasks"
        )
    if as_json:
        print_json(found)
        return
    for name, difference in found["difference"].items():
        first, second = (version["scores"][name] for version in found["versions"])
        output().print(f"{name}: {first:.4f} -> {second:.4f} ({difference:+.4f})", markup=False)


@models.command()
def promote(
    version: Annotated[int | None, typer.Argument(help="Policy version, unless --newest is given.")] = None,
    newest: Annotated[bool, typer.Option("--newest", help="Always serve the newest released version.")] = False,
    reason: Reason = "promoted by hand",
) -> None:
    """Make an evaluated policy version the champion, without the gate.

    In an online project, serve a version from now on; ends the canary or A/B test that it is part of.
    """
    from rft_platform.common.errors import UserError

    if (version is None) != newest:
        raise UserError("rft models promote: expected a version, or --newest")
    project = _project()
    if project.traffic is None:
        return _promote_champion(project, version, reason)
    _commands().promote(version, reason)
    served = "the newest released version" if newest else f"version {version}"
    return _print(f"{served} serves from now on")


def _promote_champion(project: "Project", version: int | None, reason: str) -> None:
    from rft_platform.common.errors import UserError
    from rft_platform.jobs.driver_lock import refuse_second_driver
    from rft_platform.rounds.releases.promotion import promote_version
    from rft_platform.rounds.setup.connections import connect_registry

    if version is None:
        raise UserError("rft models promote --newest is for online projects (`rft serve`): give a policy version")
    refuse_second_driver(project.home)
    champion = promote_version(project, connect_registry(project), version, reason)
    _print(f"{champion.name}: champion is {_both_versions(champion)} from now on")


def _both_versions(model: "RegisteredModel") -> str:
    return f"policy version {model.tags['policy_version']} (model version {model.version})"


@models.command("import")
def import_version(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder global_step_<n> of another project, for example of a DPO training.")
    ],
    as_json: Json = False,
) -> None:
    """Import weights that another project trained, as a version that can serve. Start a canary of it next."""
    from dataclasses import asdict

    from rft_platform.online.releases.versions import import_checkpoint
    from rft_platform.rounds.setup.connections import connect_registry
    from rft_platform.run.console import print_json

    project = _project()
    policy = import_checkpoint(project, connect_registry(project), checkpoint)
    if as_json:
        print_json(asdict(policy))
        return
    _print(f"version {policy.policy_version} was imported: `rft models canary {policy.policy_version}` tests it")


@models.command("export")
def export_version(
    version: Annotated[
        str,
        typer.Argument(
            metavar="NAME@champion|VERSION",
            help="Registered model with an alias, or a policy version.",
            show_default=False,
        ),
    ],
    merged: Annotated[
        Path, typer.Option(help="New folder for the full weights; a LoRA adapter is merged.", show_default=False)
    ],
    push: Annotated[
        str | None,
        typer.Option(metavar="hub:ORG/NAME", help="Upload the folder to the Hugging Face hub.", show_default=False),
    ] = None,
) -> None:
    """Write a version into a folder that transformers and vLLM load, with a model card of its lineage and scores."""
    from rft_platform.cli.commands.trace import find_trace
    from rft_platform.common.errors import UserError
    from rft_platform.rounds.releases.export import check_hub, export_model, push_to_hub
    from rft_platform.rounds.reporting.lineage import CheckpointTrace

    if push is not None:
        scheme, _, repository = push.partition(":")
        if scheme != "hub":
            raise UserError(f"--push {push}: expected hub:ORG/NAME")
        check_hub(repository)
    project = _project()
    trace = find_trace(project, _address(project, version))
    if not isinstance(trace, CheckpointTrace):
        raise UserError(f"{version}: expected NAME@champion, or a policy version as in `rft models list`")
    digest = export_model(project, trace, merged)
    _print(f"{merged}: policy version {trace.trainings[0].result.policy_version}, weights sha256 {digest}")
    if push is not None:
        _print(f"uploaded: {push_to_hub(merged, repository)}")


def _address(project: "Project", version: str) -> str:
    """The checkpoint folder of a policy version, or the address of a registered model."""
    from rft_platform.common.errors import UserError
    from rft_platform.online.releases.versions import policy_of_version

    if not version.isdecimal():
        return version if version.startswith("models:/") or "@" not in version else f"models:/{version}"
    policy = policy_of_version(project, int(version))
    if policy is None:
        raise UserError(f"no policy version {version}: `rft models list` shows the versions")
    return policy.folder


@models.command()
def resume(reason: Reason = "resumed by hand") -> None:
    """Continue a training that alerts have paused (service.pause_training_on_alert). A new alert pauses it again."""
    from rft_platform.common.errors import UserError
    from rft_platform.online.traffic.project_traffic import traffic_store

    project = _project()
    if project.traffic is None:
        raise UserError("rft models resume is for online projects (`rft serve`)")
    alerts = traffic_store(project).resume_training(reason)
    _print(f"training continues in spite of: {', '.join(alerts)}" if alerts else "no alert pauses the training")


@models.command()
def canary(
    version: OptionalVersion = None,
    share: Annotated[float, typer.Option(help="Share of the traffic that the version gets.")] = 0.1,
    sticky: Annotated[
        str, typer.Option(help="Unit that always gets the same version: user, conversation or request.")
    ] = "conversation",
    least_runs: Annotated[int, typer.Option(help="Labelled runs of each version before the first check.")] = 100,
    looks: Annotated[int, typer.Option(help="Number of checks; each needs twice the runs of the one before.")] = 4,
    margin: Annotated[float, typer.Option(help="Largest accepted loss of the success rate.")] = 0.05,
    reason: Reason = "started by hand",
) -> None:
    """Give a share of the traffic to a version until its success rate promotes it or rolls it back."""
    from rft_platform.online.releases.rules import canary_rule

    rule = canary_rule(least_runs, looks, margin=margin)
    _print_started(_commands().canary(version, share=share, sticky=_sticky(sticky), rule=rule, reason=reason))


@models.command()
def ab(
    version: OptionalVersion = None,
    share: Annotated[float, typer.Option(help="Share of the traffic that the version gets.")] = 0.5,
    sticky: Annotated[
        str, typer.Option(help="Unit that always gets the same version: user, conversation or request.")
    ] = "user",
    units: Annotated[int, typer.Option(help="Users, conversations or requests of each version.")] = 200,
    alpha: Annotated[float, typer.Option(help="Probability of a wrong winner of equal versions.")] = 0.05,
    reason: Reason = "started by hand",
) -> None:
    """Compare a version with the served one on live traffic; the winner serves in the end."""
    from rft_platform.online.releases.rules import ab_rule

    rule = ab_rule(units, alpha)
    _print_started(_commands().ab_test(version, share=share, sticky=_sticky(sticky), rule=rule, reason=reason))


@models.command()
def report(
    number: Annotated[
        int | None, typer.Argument(help="Number of a canary or A/B test; the newest if left out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare both versions of a canary or an A/B test: accuracy, latency, satisfaction, with p values."""
    from rft_platform.run.console import output, print_json

    found = _commands().report(number)
    if as_json:
        print_json(found)
        return
    _print(f"{found['kind']} {found['number']} is {found['status']}: {found['reason']}")
    comparison = found["comparison"]
    output().print(_comparison_table(comparison["metrics"]))
    if found["kind"] == "ab":
        _print(comparison["reason"])


def _project() -> "Project":
    from rft_platform.config.home import Home
    from rft_platform.online.project import open_project

    return open_project(Home.from_environment())


def _commands() -> "ReleaseCommands":
    from rft_platform.online.releases.versions import release_commands

    return release_commands(_project())


def _sticky(given: str) -> Any:
    from rft_platform.common.errors import UserError

    if given not in ("user", "conversation", "request"):
        raise UserError(f"--sticky {given}: expected user, conversation or request")
    return given


def _print(line: str) -> None:
    from rft_platform.run.console import output

    output().print(line, markup=False, soft_wrap=True)


def _print_started(release: "Release") -> None:
    _print(
        f"{release.kind} {release.number}: version {release.candidate_version} gets {release.share:.0%} of the "
        f"traffic, version {release.base_version} the rest; `rft models report` compares them"
    )


def _versions_table(versions: list[dict[str, Any]], aliases: dict[str, str], *, online: bool) -> "Table":
    """A table of the versions with their held-out pass rates; if ``online``, also whether released, and the traffic."""
    from rich.table import Table

    table = Table("policy version", "round", "model version", "alias", "sampled", "greedy", "mean reward")
    for name in ("released", "traffic") if online else ():
        table.add_column(name)
    for each in versions:
        origin = "imported" if each["round"] is None else each["round"]
        model = "" if each["model_version"] is None else str(each["model_version"])
        scores = [_score(each["scores"].get(name), form) for name, form in _SCORES.items()]
        values = [str(each["version"]), str(origin), model, aliases.get(model, ""), *scores]
        if online:
            traffic = each.get("traffic", 0)
            values += ["yes" if each["released"] else "no", f"{traffic:.0%}" if traffic else ""]
        table.add_row(*values)
    return table


def _score(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _aliases(project: "Project") -> dict[str, str]:
    """The aliases of each model version; empty if MLflow is a server, because its client takes seconds to import."""
    from rft_platform.model_registry.sqlite_reader import read_versions
    from rft_platform.rounds.setup.connections import configured_uri, local_uri

    found = read_versions(configured_uri(project) or local_uri(project.home), project.model_name) or []
    return {str(version.version): ", ".join(version.aliases) for version in found}


def _comparison_table(metrics: list[dict[str, Any]]) -> "Table":
    """A table of each metric: the values of both versions, the difference with its interval, and the p value."""
    from rich.table import Table

    def number(value: float | None, form: str = ".4f") -> str:
        return "" if value is None else format(value, form)

    table = Table("metric", "base", "candidate", "units", "difference", "95 % interval", "p")
    for each in metrics:
        interval = "" if each["low"] is None else f"{each['low']:+.4f} to {each['high']:+.4f}"
        table.add_row(
            each["metric"], number(each["base"]), number(each["candidate"]),
            f"{each['base_units']} / {each['candidate_units']}", number(each["difference"], "+.4f"), interval,
            number(each["p_value"], ".2g"),
        )  # fmt: skip
    return table
