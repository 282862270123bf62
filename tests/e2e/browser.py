"""A headless Chromium, driven over its debugging protocol: pages as a person, or a hostile site, opens them."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


class Tab:
    """One page of the browser."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._count = connection, 0
        self.statuses: dict[str, int] = {}  #: HTTP status of each address that the page has asked for
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol; what happens meanwhile is noted."""
        self._count += 1
        self._connection.send(json.dumps({"id": self._count, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=60))
            if message.get("method") == "Network.responseReceived":
                response = message["params"]["response"]
                self.statuses[response["url"]] = response["status"]
            if message.get("id") == self._count:
                if "navigated" in message.get("error", {}).get("message", ""):  # the page was left meanwhile
                    return self.call(method, **parameters)
                assert "error" not in message, message["error"]
                return dict(message["result"])

    def open(self, url: str) -> None:
        """Go to an address and wait until the page has loaded."""
        self.call("Page.navigate", url=url)
        time.sleep(0.2)  # until then the page before still says that it is complete
        self.wait_for("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout: float = 60.0) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + timeout
        while not self.run(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"never true: {expression}; page: {self.run('document.body.innerText')}"
            time.sleep(0.1)

    def picture(self, file: Path) -> None:
        """Write a picture of what the window shows."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(folder: Path, *options: str) -> Iterator[Tab]:
    """A browser with an empty profile in ``folder``; gives its only tab. Skips the test where there is none."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(PROGRAMS)} is on the PATH (Debian: apt-get install chromium)")
    command = [
        program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--remote-debugging-port=0", "--remote-allow-origins=*",
        "--window-size=1400,900", f"--user-data-dir={folder}", *options, "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with connect(_address(folder, process), max_size=None, proxy=None) as connection:
            yield Tab(connection)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(folder: Path, process: "subprocess.Popen[bytes]") -> str:
    """The debugging address of the tab."""
    file, deadline = folder / "DevToolsActivePort", time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the browser ended with exit code {process.returncode}"
        if file.exists() and (lines := file.read_text().splitlines()):
            tabs = httpx.get(f"http://127.0.0.1:{lines[0]}/json/list", trust_env=False).json()
            pages = [tab for tab in tabs if tab["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.1)
    raise AssertionError("the browser was not ready after 60 s")
