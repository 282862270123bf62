"""A project on paper, and a real HTTP server that takes alerts."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.rounds.project.project import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A started project of 1,000 rounds; nothing has run yet."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", "answer": "3"}\n')
    config = {
        "project": "sums",
        "name": "paper",
        "model": {"model_path": "unused"},
        "algorithm": {"repeat_times": 2},
        "buffer": {"batch_size": 2, "total_steps": 1000, "explorer_input": {"taskset": {"path": str(tasks)}}},
    }
    home = Home(tmp_path / "home")
    write_text(home.config_file, yaml.safe_dump(config))
    return Project.open(home)


@dataclass
class Inbox:
    """What was posted, and how the next post is answered."""

    url: str
    received: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    arrived: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    """A webhook on the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            box.received.append(json.loads(body))
            self.send_response(box.status)
            self.end_headers()
            box.arrived.set()

        def log_message(self, *_: object) -> None:
            """Nothing on the test's standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    box = Inbox(f"http://127.0.0.1:{server.server_address[1]}/in/s3cr3tpath")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield box
    server.shutdown()
    server.server_close()
    thread.join()
