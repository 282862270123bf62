"""``rft metrics``: the project's state for Prometheus."""

from typing import Annotated

import typer


def metrics(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to serve on.")] = 9464,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine only behind a proxy.")
    ] = "127.0.0.1",
) -> None:
    """Serve /metrics (read from the project at every scrape) and /healthz until Ctrl-C."""
    from rft_platform.config.home import Home
    from rft_platform.driving.console import output
    from rft_platform.driving.drive import use_home
    from rft_platform.errors import UserError
    from rft_platform.metrics.server import serve_metrics
    from rft_platform.observability.logs import configured
    from rft_platform.processes.signals import terminable

    home = Home.from_environment()
    use_home(home)
    output().print(f"metrics    http://{host}:{port}/metrics", markup=False, soft_wrap=True)
    try:
        with terminable(), configured("metrics"):
            serve_metrics(home, host, port)
    except KeyboardInterrupt:
        output().print("stopped")
    except OSError as error:
        raise UserError(
            f"port {port} of {host} cannot be used ({error.strerror}): choose another with --port"
        ) from error
