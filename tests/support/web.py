"""An application served on a free port, for tests with a browser."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from rft_platform.inference.serving.http_server import server_config


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve ``app`` within the block; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(server_config(app, 1, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
