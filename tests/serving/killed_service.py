"""A service in a process of its own, for tests that kill it."""

import json
import sys

import uvicorn

from rft_platform.inference.interface import EngineStatus, SamplingParams
from rft_platform.inference.serving.http_server import server_config
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.serving.app import CommitRule, build_app
from rft_platform.serving.database import open_database
from rft_platform.serving.gateway import ServedEngine, TrafficApp
from rft_platform.serving.selection import Selection
from rft_platform.serving.traffic import TrafficStore
from rft_platform.serving.writer import TrafficWriter

if __name__ == "__main__":
    port, url, engine_url, key, status = sys.argv[1:]
    engine = ServedEngine(
        EngineStatus(**json.loads(status)), RecordingClients(engine_url, 60.0, api_key=key), engine_url
    )
    writer = TrafficWriter(TrafficStore(open_database(url)))
    gateway = TrafficApp(lambda: engine, writer, Selection([]), SamplingParams(max_tokens=4))
    app = build_app(gateway, writer, CommitRule(), dict)
    uvicorn.Server(server_config(app, 1, port=int(port), log_config=None)).run()
