"""A Postgres server on loopback, where the machine has its programs."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.ports import free_port

PASSWORD = "correct-horse-battery"


def program(name: str) -> str | None:
    """The path of one of Postgres's programs; None if it is not installed. Debian puts them off the PATH."""
    packaged = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    return shutil.which(name) or next(map(str, packaged), None)


@contextmanager
def postgres_server() -> Iterator[str]:
    """URL, with password, of an empty database on a free loopback port; ``program`` must find the programs."""
    initdb, pg_ctl = program("initdb"), program("pg_ctl")
    assert initdb is not None and pg_ctl is not None
    user = "postgres" if os.getuid() == 0 else None  # the server refuses to run as root
    # Not below pytest's folder: that is its owner's alone, and the server runs as somebody else.
    with TemporaryDirectory(prefix="rft-postgres-") as temporary:
        folder = Path(temporary)
        (folder / "password").write_text(PASSWORD)
        if user:
            for path in (folder, folder / "password"):
                shutil.chown(path, user)
        with _running(folder, initdb, pg_ctl, user) as port:
            yield f"postgresql+psycopg2://rft:{PASSWORD}@127.0.0.1:{port}/postgres"


@contextmanager
def _running(folder: Path, initdb: str, pg_ctl: str, user: str | None) -> Iterator[int]:
    """A server with its data in ``folder``, for the length of the block; gives its port."""
    data, log, port = folder / "data", folder / "server.log", free_port()

    def run(*command: str) -> None:
        done = subprocess.run(
            command, user=user, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command[0]}: {done.stderr}\n{log.read_text() if log.exists() else ''}"

    password = f"--pwfile={folder / 'password'}"
    run(initdb, "-D", str(data), "-U", "rft", "-A", "scram-sha-256", password, "--no-sync", "-E", "UTF8")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
    run(pg_ctl, "-D", str(data), "-l", str(log), "-o", options, "-w", "start")
    try:
        yield port
    finally:
        run(pg_ctl, "-D", str(data), "-m", "fast", "-w", "stop")
