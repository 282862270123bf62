"""``rft stop``: end the project's engine and trainer."""

import typer


def stop() -> None:
    """End this project's policy engine and trainer. Nothing is lost: what was in the middle starts again."""
    from rft_platform.cli import leases
    from rft_platform.config.home import Home

    home = Home.from_environment()
    held = leases.leases_of(home)
    for one in held:
        alive = leases.stop(one)
        typer.echo(f"{one.lease.kind} (pid {one.lease.pid}): {'stopped' if alive else 'was gone already'}")
    if not held:
        typer.echo(f"nothing runs for {home.root}")
