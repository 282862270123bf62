"""``rft ui``: the Dagster and MLflow interfaces of the project, with the daemon that runs its sensors."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rft_platform.config.home import Home
    from rft_platform.servers.supervise import Server


def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the Dagster interface.")] = 3000,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the MLflow interface.")] = 5000,
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
    from rft_platform.config.load import load_config
    from rft_platform.driver.console import notes
    from rft_platform.driver.preflight import check_writable
    from rft_platform.driver.run import use_home
    from rft_platform.driver.start import begin
    from rft_platform.jobs.sensor_interval import sensor_interval_s
    from rft_platform.jobs.singleton_lock import singleton_lock
    from rft_platform.servers.supervise import check_port, check_ports
    from rft_platform.servers.ui_servers import ui_servers

    if auto and not daemon:
        raise UserError("--auto turns on sensors, which need the daemon: leave out --no-daemon")
    sensor_interval_s()
    home = Home.from_environment()
    check_writable(home)
    use_home(home)
    if config is not None:
        begin(home, load_config(config))
    elif not home.config_file.exists():
        notes().print(f"no project in {home.root} yet: `rft ui --config rft.yaml` starts one", markup=False)
    with singleton_lock(home.leases / "ui.lock", f"`rft ui` of {home.root}", Dagster=f"port {port}"):
        check_port("Dagster", port)  # before the databases are opened, which takes seconds
        servers = ui_servers(home, port, mlflow_port, daemon, metrics_port)
        check_ports(servers)
        serve_until_interrupted(home, servers, sensors_of=f"http://127.0.0.1:{port}" if auto else None)


def serve_until_interrupted(home: "Home", servers: "list[Server]", sensors_of: str | None) -> None:
    """Keep ``servers`` running until Ctrl-C; ``sensors_of`` is the Dagster interface whose sensors are turned on."""
    from rft_platform.common.processes.signals import terminable
    from rft_platform.driver.console import notes, output, print_link
    from rft_platform.servers.leases import leases_of
    from rft_platform.servers.supervise import serving, wait_for_end
    from rft_platform.servers.ui_servers import start_sensors
    from rft_platform.web_guard.token import access_token

    console = output()
    notes().print(f"starting {', '.join(server.name for server in servers)} ...", markup=False)
    try:
        with terminable(), serving(servers, home.logs) as children:
            for server in servers:
                print_link(server.name, server.url or "running")
            if sensors_of is not None:
                start_sensors(sensors_of, access_token(home.web_token))
                console.print(f"{'sensors':<10} on", markup=False)
            console.print("Ctrl-C stops them", style="dim")
            wait_for_end(children, lambda line: notes().print(line, markup=False, soft_wrap=True))
    except KeyboardInterrupt:
        console.print("stopped")
        alive = [held.path.stem for held in leases_of(home) if held.alive]
        if alive:
            console.print(
                f"{' and '.join(alive)} keep running until their idle time-out; `rft stop` ends them", markup=False
            )
