"""``rft stop``: stop the project's engine and trainer."""

import typer


def stop() -> None:
    """Stop this project's policy engine and trainer. Nothing is lost: interrupted work is repeated."""
    from rft_platform.config.home import Home
    from rft_platform.servers import leases

    home = Home.from_environment()
    leases.wait_for_starts(home)
    leased = leases.leases_of(home)
    for one in leased:
        alive = leases.stop(one)
        typer.echo(f"{one.lease.kind} (pid {one.lease.pid}): {'stopped' if alive else 'had already ended'}")
    strays = leases.stop_strays(home)
    for pid in strays:
        typer.echo(f"process without a lease (pid {pid}): stopped")
    if not leased and not strays:
        typer.echo(f"nothing is running for {home.root}")
