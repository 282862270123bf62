"""A Hugging Face hub on loopback that takes uploads as its client sends them: repositories, commits and large files."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_this_test"


@dataclass
class FakeHub:
    """What the hub has received."""

    url: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)  # committed, by path
    large: dict[str, bytes] = field(default_factory=dict)  # by sha256

    def commit(self, lines: list[dict[str, Any]]) -> None:
        for value in (line["value"] for line in lines if line["key"] != "header"):
            content = value.get("content")
            self.files[value["path"]] = self.large[value["oid"]] if content is None else base64.b64decode(content)

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.url}/{json.loads(body)['organization']}/{json.loads(body)['name']}"}
        if "/preupload/" in path:
            files = [each["path"] for each in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in files}
            return {"files": [{"path": name, "uploadMode": modes[name], "shouldIgnore": False} for name in files]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = {each["oid"]: {"upload": {"href": f"{self.url}/large/{each['oid']}"}} for each in objects}
            return {"transfer": "basic", "objects": [{**each, "actions": upload[each["oid"]]} for each in objects]}
        if "/commit/" in path:
            self.commit([json.loads(line) for line in body.splitlines()])
            repository = path.removeprefix("/api/models/").partition("/commit/")[0]
            return {"commitUrl": f"{self.url}/{repository}/commit/1", "commitOid": "1", "pullRequestUrl": None}
        return {}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that accepts ``TOKEN`` only."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or self._chunks()
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._send(401, {"error": "Invalid username or password."})
            return self._send(200, hub.answer(self.path.partition("?")[0], body))

        def do_PUT(self) -> None:
            hub.large[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(200, {})

        def _chunks(self) -> bytes:
            found = b""
            while self.headers.get("Transfer-Encoding") == "chunked" and (size := int(self.rfile.readline(), 16)):
                found += self.rfile.read(size)
                self.rfile.readline()
            return found

        def _send(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
