"""``python -m chaos.online.echo_service PORT DATABASE_URL ENGINE_URL ENGINE_KEY STATUS [CLOCK]``: a service alone.

It is the HTTP API of ``rft serve`` before any engine, without a project, for tests and benchmarks that kill or load it.
``STATUS`` is the engine's status as JSON. ``CLOCK`` is a file with the seconds by which the clock of the database's
times is wrong.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import uvicorn

from chaos.online import echo_engine
from rft_platform.cluster.this_process import keep_imports
from rft_platform.inference.interface import EngineStatus, SamplingParams
from rft_platform.inference.serving.http_server import ConnectionLimits, server_config
from rft_platform.online.gateway.app import CommitRule, build_app
from rft_platform.online.gateway.proxy import TrafficApp
from rft_platform.online.gateway.release_routes import release_routes
from rft_platform.online.releases.commands import ReleaseCommands, ServableVersion
from rft_platform.online.releases.routing import ServedEngine
from rft_platform.online.releases.store import ReleaseStore
from rft_platform.online.traffic.database import open_database
from rft_platform.online.traffic.reader import TrafficReader
from rft_platform.online.traffic.selection import Selection
from rft_platform.online.traffic.store import TrafficStore
from rft_platform.online.traffic.writer import SWITCH_INTERVAL_S, TrafficWriter
from rft_platform.rollout.recording.clients import RecordingClients

GROUP_SIZE = 2  #: runs of a task that are committed together
_GROUP_DEADLINE_S = 1e9  # no jump of the clock reaches it
_GRACE_S = 1
_BODY_S, _CONNECTIONS = 30.0, 4096
_VERSIONS = [ServableVersion(number, number, str(number), True, {"score": 0.5}) for number in range(3)]


def arguments(port: int, database_url: str, engine_port: int, clock: Path | None = None) -> list[str]:
    """The arguments of a service before an echo engine."""
    status = json.dumps(asdict(echo_engine.status()))
    found = [str(port), database_url, f"http://127.0.0.1:{engine_port}/v1", "none", status]
    return found if clock is None else [*found, str(clock)]


def serve(given: Sequence[str]) -> None:
    """Serve until a signal."""
    keep_imports()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    port, url, engine_url, key, status, *clock = given
    clients = RecordingClients(engine_url, 60.0, api_key=key)
    engine = ServedEngine(EngineStatus(**json.loads(status)), clients, engine_url)

    def now() -> float:
        return time.time() + (float(Path(clock[0]).read_text()) if clock else 0.0)

    database = open_database(url)
    writer = TrafficWriter(TrafficStore(database, now))
    releases = ReleaseCommands(ReleaseStore(database, now), lambda: _VERSIONS)
    gateway = TrafficApp(lambda: engine, writer, Selection([]), SamplingParams(max_tokens=4))
    reader = TrafficReader()
    routes = [release_routes(releases, writer, reader, gateway.tenant_of)]
    app = build_app(gateway, writer, reader, CommitRule(GROUP_SIZE, _GROUP_DEADLINE_S), routes=routes)
    limits = ConnectionLimits.within_open_files(_BODY_S, _CONNECTIONS)
    config = server_config(
        app, _GRACE_S, limits=limits, host="127.0.0.1", port=int(port), log_config=None, proxy_headers=False
    )
    uvicorn.Server(config).run()


if __name__ == "__main__":
    serve(sys.argv[1:])
