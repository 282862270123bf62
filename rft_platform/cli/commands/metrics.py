"""``rft metrics``: serve the project's state to Prometheus."""

from typing import Annotated

import typer


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
    from rft_platform.common.errors import UserError
    from rft_platform.common.processes.signals import terminable
    from rft_platform.config.home import Home
    from rft_platform.driver.console import output
    from rft_platform.driver.run import use_home
    from rft_platform.metrics.server import serve_metrics
    from rft_platform.observability.logs import configured
    from rft_platform.web_guard.token import access_token

    home = Home.from_environment()
    use_home(home)
    token = None if no_token else access_token(home.web_token)
    output().print(f"metrics    http://{host}:{port}/metrics", markup=False, soft_wrap=True)
    try:
        with terminable(), configured("metrics"):
            serve_metrics(home, host, port, token)
    except KeyboardInterrupt:
        output().print("stopped")
    except OSError as error:
        raise UserError(
            f"port {port} of {host} cannot be used ({error.strerror}): choose another with --port"
        ) from error
