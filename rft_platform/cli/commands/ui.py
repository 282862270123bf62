"""``rft ui``: the Dagster and MLflow interfaces of the project, with the daemon that acts on its sensors."""

from typing import Annotated

import typer


def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the Dagster interface.")] = 3000,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the MLflow interface.")] = 5000,
    daemon: Annotated[
        bool, typer.Option("--daemon/--no-daemon", help="Run the daemon: sensors, schedules, launched runs.")
    ] = True,
) -> None:
    """Serve the Dagster and MLflow interfaces on this machine until Ctrl-C."""
    from rft_platform.cli.console import notes, output
    from rft_platform.cli.driving import terminable, use_home
    from rft_platform.cli.preflight import check_writable
    from rft_platform.cli.servers import check_ports, serving, wait_for_end
    from rft_platform.cli.ui_servers import ui_servers
    from rft_platform.config.home import Home

    home, console = Home.from_environment(), output()
    check_writable(home)
    use_home(home)
    servers = ui_servers(home, port, mlflow_port, daemon)
    check_ports(servers)
    notes().print(f"starting {', '.join(server.name for server in servers)} ...", markup=False)
    try:
        with terminable(), serving(servers, home.logs) as children:
            for server in servers:
                where = server.url or "running"
                console.print(f"{server.name:<10} {where}", markup=False, soft_wrap=True)
            console.print("Ctrl-C stops them", style="dim")
            wait_for_end(children)
    except KeyboardInterrupt:
        console.print("stopped")
