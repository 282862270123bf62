"""The audit's exit status, against an OSV server of the test's own."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts import audit
from scripts.lock import REQUIREMENTS

pytest.importorskip("pip_audit", reason="needs pip-audit: make setup")

ADVISORY = {
    "id": "PYSEC-2099-1",
    "modified": "2099-01-01T00:00:00Z",
    "published": "2099-01-01T00:00:00Z",
    "aliases": [],
    "affected": [
        {
            "package": {"name": "attrs", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}],
            "versions": ["26.1.0"],
        }
    ],
}


@contextmanager
def osv(vulnerable: str) -> Iterator[str]:
    """URL of an OSV query endpoint that knows one advisory."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = [ADVISORY] if query["package"]["name"] == vulnerable else []
            body = json.dumps({"vulns": found} if found else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def requirements(tmp_path: Path) -> Path:
    file = tmp_path / "lock.txt"
    file.write_text("attrs==26.1.0\nidna==3.20\n")
    return file


def test_every_lock_file_is_audited() -> None:
    assert set(REQUIREMENTS.glob("*.txt")) <= set(audit.FILES)


@pytest.mark.slow
def test_a_known_vulnerability_is_named_with_the_release_that_fixes_it(
    requirements: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with osv("attrs") as url:
        monkeypatch.setenv("OSV_URL", url)
        assert audit.main([requirements]) == audit.VULNERABLE
    said = capsys.readouterr().out
    assert "2 packages looked up, 1 vulnerable" in said
    assert "attrs 26.1.0: PYSEC-2099-1, fixed in 99.0" in said


@pytest.mark.slow
def test_no_known_vulnerability_is_success(requirements: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with osv("another") as url:
        monkeypatch.setenv("OSV_URL", url)
        assert audit.main([requirements]) == 0


@pytest.mark.slow
def test_a_database_that_does_not_answer_is_no_success(
    requirements: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with osv("another") as url:
        pass
    monkeypatch.setenv("OSV_URL", url)
    assert audit.main([requirements]) == audit.NOT_AUDITED
    assert "NOT AUDITED" in capsys.readouterr().out
