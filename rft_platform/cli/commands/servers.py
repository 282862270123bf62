"""``rft ui``, ``rft view``, ``rft metrics``, ``rft engine``: serve pages, metrics and the engine of a project.

``rft stop`` ends its processes.
"""

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rft_platform.servers.ports import DAGSTER_PORT, MLFLOW_PORT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rft_platform.config.home import Home
    from rft_platform.servers.ui_servers import Server


def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the Dagster interface.")] = DAGSTER_PORT,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the MLflow interface.")] = MLFLOW_PORT,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Also serve /metrics for Prometheus, on this port.")
    ] = None,
    daemon: Annotated[
        bool,
        typer.Option(
            "--daemon/--no-daemon", help="Run the Dagster daemon, which runs sensors, schedules and launched runs."
        ),
    ] = True,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Start or continue the project of this YAML file.")
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Turn on the sensors: rounds run automatically until the budget is used up.")
    ] = False,
) -> None:
    """Serve the Dagster and MLflow interfaces on this machine until Ctrl-C. A server that dies is restarted."""
    from rft_platform.common.errors import UserError
    from rft_platform.config.home import Home
    from rft_platform.config.load import load_config, load_config_of
    from rft_platform.jobs.driver_lock import refuse_if_served, servers_lock
    from rft_platform.jobs.sensor_interval import sensor_interval_s
    from rft_platform.run.console import notes
    from rft_platform.run.project_checks import check_writable
    from rft_platform.run.start import begin, use_home
    from rft_platform.servers.ports import check_ports
    from rft_platform.servers.ui_servers import ui_ports, ui_servers

    if auto and not daemon:
        raise UserError("--auto turns on sensors, which need the daemon: leave out --no-daemon")
    sensor_interval_s()
    home = Home.from_environment()
    check_writable(home)
    use_home(home)
    in_force = load_config_of(home) if home.config_file.exists() else None
    loaded = in_force if config is None else load_config(config)
    refuse_if_served(home, "train")
    check_ports(ui_ports(home, loaded, port, mlflow_port, metrics_port))
    if loaded is None:
        notes().print(f"no project in {home.root} yet: `rft ui --config rft.yaml` starts one", markup=False)
    elif config is not None:
        begin(home, loaded)
    with servers_lock(home, "train", Dagster=f"port {port}"):
        servers = ui_servers(home, port, mlflow_port, daemon, metrics_port)
        serve_until_interrupted(home, servers, sensors_of=f"http://127.0.0.1:{port}" if auto else None)


def serve_until_interrupted(home: "Home", servers: "list[Server]", sensors_of: str | None) -> None:
    """Keep ``servers`` running until Ctrl-C; ``sensors_of`` is the Dagster interface whose sensors are turned on."""
    from rft_platform.cluster.local.supervisor import serving
    from rft_platform.cluster.this_process import terminable
    from rft_platform.run.console import notes, output, print_links
    from rft_platform.servers.ui_servers import start_sensors
    from rft_platform.web_guard.token import access_token

    console = output()
    notes().print(f"starting {', '.join(server.name for server in servers)} ...", markup=False)
    try:
        services = [server.service for server in servers if server.service is not None]
        with terminable(), serving(home.own_servers, services) as supervisor:
            links: list[tuple[str, str]] = []
            for server in servers:
                links += [(server.name, server.url), *((f"  {what}", page) for what, page in server.pages.items())]
            print_links(links, home.web_token)
            if sensors_of is not None:
                start_sensors(sensors_of, access_token(home.web_token))
                console.print(f"{'sensors':<10} on", markup=False)
            console.print("Ctrl-C stops them", style="dim")
            supervisor.watch(lambda end: notes().print(end.message, markup=False, soft_wrap=True))
    except KeyboardInterrupt:
        console.print("stopped")
        alive = [service.name for service in home.cluster.running()]
        if alive:
            console.print(
                f"{' and '.join(alive)} keep running until their idle time-out; `rft stop` ends them", markup=False
            )


def metrics(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to serve on.")] = 9464,
    host: Annotated[
        str, typer.Option(help="Address to listen on; an address that other machines reach needs a proxy in front.")
    ] = "127.0.0.1",
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Serve without the access token, to everybody who can connect.")
    ] = False,
) -> None:
    """Serve /metrics (read from the project at every scrape) and /healthz until Ctrl-C.

    Scrapers send `Authorization: Bearer TOKEN`; the token is RFT_WEB_TOKEN, or else the content of RFT_HOME/web_token.
    """
    from rft_platform.cluster.local.service_process import end_with_starter
    from rft_platform.cluster.this_process import terminable
    from rft_platform.config.home import Home
    from rft_platform.observability.logs import configured
    from rft_platform.run.console import output
    from rft_platform.run.start import use_home
    from rft_platform.servers.metrics.server import serve_metrics
    from rft_platform.web_guard.token import access_token

    end_with_starter()  # `rft ui --metrics-port` starts this command
    home = Home.from_environment()
    use_home(home)
    token = None if no_token else access_token(home.web_token)
    line = f"metrics    http://{host}:{port}/metrics"
    try:
        with terminable(), configured("metrics"), _listening(host, port):
            serve_metrics(home, host, port, token, lambda: output().print(line, markup=False, soft_wrap=True))
    except KeyboardInterrupt:
        output().print("stopped")


@contextmanager
def _listening(host: str, port: int) -> "Iterator[None]":
    """Raise UserError for an address that cannot be listened on."""
    from rft_platform.common.errors import UserError

    try:
        yield
    except OSError as error:
        if error.filename is not None:  # of a file
            raise
        raise UserError(
            f"port {port} of {host} cannot be used ({error.strerror}): choose another with --port or --host"
        ) from error


def view(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to serve on.")] = 3100,
    host: Annotated[
        str, typer.Option(help="Address to listen on; an address that other machines reach needs a proxy in front.")
    ] = "127.0.0.1",
) -> None:
    """Serve pages over rounds and stored runs until Ctrl-C: learning curve, search, transcripts, policies compared."""
    from rft_platform.cluster.this_process import terminable
    from rft_platform.config.home import Home
    from rft_platform.online.project import open_project
    from rft_platform.run.console import output, print_links
    from rft_platform.run.start import use_home
    from rft_platform.servers.ports import Port, check_ports
    from rft_platform.servers.viewer.app import serve_view
    from rft_platform.web_guard.asgi import sign_in_url
    from rft_platform.web_guard.token import access_token

    home = Home.from_environment()
    use_home(home)
    open_project(home)
    check_ports([Port(port, "rft view", "--port")])
    token = access_token(home.web_token)
    try:
        with terminable(), _listening(host, port):
            link = sign_in_url(f"http://{host}:{port}", token)
            serve_view(home, host, port, token, lambda: print_links([("view", link)], home.web_token))
    except KeyboardInterrupt:
        pass
    output().print("stopped")


def engine(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to serve on.")],
    token_env: Annotated[
        str, typer.Option("--token-env", help="Environment variable with the engine's token, of 16 characters or more.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The project's YAML file; default: the project in RFT_HOME.")
    ] = None,
    replica: Annotated[int, typer.Option(min=0, help="Number of this replica, if the project has several.")] = 0,
) -> None:
    """Serve the policy engine of a project in the foreground, for a project elsewhere that names it in engine.urls.

    The server answers to the name of this host; RFT_WEB_HOSTS names further ones.
    """
    import os
    import socket
    from dataclasses import replace

    from rft_platform.cluster.local.local_cluster import LocalCluster
    from rft_platform.cluster.local.service_process import TOKEN_VARIABLE
    from rft_platform.common.errors import UserError
    from rft_platform.config.home import Home
    from rft_platform.config.load import load_config, load_config_of
    from rft_platform.inference.launch.launcher import engine_service
    from rft_platform.online.project import project_in
    from rft_platform.rounds.setup.connections import base_model_folder, policy_spec
    from rft_platform.run.start import use_home
    from rft_platform.web_guard.checks import HOSTS_VARIABLE

    if len(token := os.environ.get(token_env, "")) < 16:
        raise UserError(f"--token-env {token_env}: expected a token of at least 16 characters in this variable")
    home = Home.from_environment()
    use_home(home)
    project = project_in(home, load_config(config) if config is not None else load_config_of(home))
    service = engine_service(base_model_folder(project), policy_spec(project, replica), f"served-{port}")
    hosts = os.environ.get(HOSTS_VARIABLE, ",".join({host, socket.gethostname(), socket.getfqdn()}))
    typer.echo(f"engine     http://{host}:{port}")
    LocalCluster(home.leases, home.logs).become(
        replace(
            service, host=host, port=port, idle_timeout_s=None,
            env={**service.env, TOKEN_VARIABLE: token, HOSTS_VARIABLE: hosts},
        )
    )  # fmt: skip


def stop() -> None:
    """Stop the engines, the trainer and the `rft engine` servers of this home. Nothing is lost: work is repeated."""
    from rft_platform.config.home import Home

    home = Home.from_environment()
    cluster = home.cluster
    # beside the trainer: only engines are restarted in the background
    cluster.wait_for_starts("engine*", "auxiliary-*", "policy-*")
    services = cluster.services()
    for name, status in services.items():
        ran = cluster.stop(name, 10.0, generation=status.address.generation)
        kind, pid = status.address.details["kind"], status.address.details["pid"]
        typer.echo(f"{kind} (pid {pid}): {'stopped' if ran else 'had already ended'}")
    strays = cluster.stop_strays()
    for pid in strays:
        typer.echo(f"process without a lease (pid {pid}): stopped")
    if not services and not strays:
        typer.echo(f"nothing is running for {home.root}")
