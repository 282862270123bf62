"""Commands of online projects: ``rft serve`` serves the policy and trains; ``rft forget`` erases a person's data."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rft_platform.servers.ports import DAGSTER_PORT, MLFLOW_PORT

if TYPE_CHECKING:
    from rft_platform.config.home import Home
    from rft_platform.rounds.maintenance.row_erasure import Forgotten


def serve(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Start or continue the project of this YAML file.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the Dagster interface.")] = DAGSTER_PORT,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the MLflow interface.")] = MLFLOW_PORT,
    train: Annotated[
        bool, typer.Option("--train/--no-train", help="Run the sensors that train on committed rows.")
    ] = True,
) -> None:
    """Serve the policy's OpenAI API with feedback and commit, and train on what was committed, until Ctrl-C.

    Mode serve starts the service alone, mode train the training alone: two commands, each with its own file, make an
    online project together, with one RFT_HOME or on two hosts.
    """
    from rft_platform.cli.commands.servers import serve_until_interrupted
    from rft_platform.config.home import Home
    from rft_platform.config.load import load_config
    from rft_platform.jobs.driver_lock import refuse_if_served, servers_lock
    from rft_platform.online.project import open_project
    from rft_platform.online.releases.exchange import publishing
    from rft_platform.online.releases.versions import naming_the_serving_version
    from rft_platform.run.checks import check_run
    from rft_platform.run.project_checks import check_writable
    from rft_platform.run.start import begin, use_home
    from rft_platform.servers.ports import check_ports
    from rft_platform.servers.ui_servers import online_port, online_server, ui_ports, ui_servers

    home = Home.from_environment()
    check_writable(home)
    use_home(home)
    loaded = load_config(config) if config is not None else open_project(home).config
    mode = loaded.mode
    trains = train and mode != "serve"
    refuse_if_served(home, mode)
    ports = ui_ports(home, loaded, port, mlflow_port) if mode != "serve" else []
    check_ports([*ports, online_port(loaded)] if mode != "train" else ports)
    if config is not None:
        begin(home, loaded, service=True)
    else:
        check_run(home, loaded, service=True)
    project = open_project(home)
    dagster = {} if mode == "serve" else {"Dagster": f"port {port}"}
    naming = nullcontext() if mode == "serve" else naming_the_serving_version(project)
    with servers_lock(home, mode, **dagster), publishing(project), naming:
        servers = ui_servers(home, port, mlflow_port, daemon=trains) if mode != "serve" else []
        servers += [online_server(home, project, port)] if mode != "train" else []
        serve_until_interrupted(home, servers, sensors_of=f"http://127.0.0.1:{port}" if trains else None)


def forget(
    subject: Annotated[
        str | None, typer.Option("--subject", help="The person, as named by x-rft-subject, `user` or imported traces.")
    ] = None,
    trace: Annotated[list[str] | None, typer.Option("--trace", help="The id of an imported trace; repeatable.")] = None,
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", help="Only calls of this tenant; needed if several tenants have such a subject."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Erase the texts and tokens of a person, or of imported traces; rows of rounds stay as tombstones.

    Weights cannot forget: the report names every model version that was trained on the rows.
    """
    from rft_platform.config.home import Home
    from rft_platform.object_store.mirror import mirror_of, store_changes
    from rft_platform.run.console import output, print_json

    home = Home.from_environment()
    if (mirror := mirror_of(home.root)) is not None:
        mirror.fetch_lost()  # a file that is lost here is erased there too
    found = _forget(home, subject, tenant, trace or [])
    store_changes(home.root, erase=True)
    if as_json:
        print_json(found)
        return
    console = output()
    console.print(f"erased {found.rows:,} rows, {len(found.rounds)} round(s) held some of them", markup=False)
    for title, refs in (("trained on them", found.trained), ("descend from those", found.descendants)):
        for ref in refs:
            version = f"model version {ref.model_version}" if ref.model_version else "not registered"
            console.print(f"{title}: {ref.checkpoint} ({version})", markup=False, soft_wrap=True)
    if not found.trained:
        console.print("no model version was trained on them", markup=False)


def _forget(home: "Home", subject: str | None, tenant: str | None, traces: list[str]) -> "Forgotten":
    """Erase what imports and production traffic hold. Raises UserError if neither has any of it."""
    from rft_platform.common.errors import UserError
    from rft_platform.online.forget import UnknownSubjectError
    from rft_platform.online.forget import forget as forget_traffic
    from rft_platform.online.project import open_project
    from rft_platform.rounds.maintenance.forget_imports import Whose, forget_imports, nothing_of
    from rft_platform.rounds.setup.connections import connect_registry

    if subject is None and not traces:
        raise UserError("name a person by --subject, or imported traces by --trace")
    project = open_project(home) if home.config_file.exists() else None
    registry = connect_registry(project) if project is not None else None
    whose = Whose(subject, frozenset(traces))
    found = forget_imports(home, project, registry, whose)
    if project is None or project.traffic is None or subject is None:
        if found is None:
            raise nothing_of(whose)
        return found
    try:
        called = forget_traffic(project, registry, subject, tenant)
    except UnknownSubjectError:
        if found is None:
            raise
        return found
    return called if found is None else found.and_of(called)
