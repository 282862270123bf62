"""The questions of ``store_at_size`` to a project whose durable copy is on an object store (``store_url``).

The store is an S3 server on loopback (moto, in a process of its own) behind a proxy that delays every request. Asked
are the home that wrote the project, and an empty one that takes it over. Each answer comes with its requests and bytes.
"""

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.s3.faulty_proxy import FaultyProxy
from tests.support.ports import free_port

BUCKET = "size"
URL = f"s3://{BUCKET}/projects/grown"
#: What is demanded, in seconds.
LIMITS_S = {"sensor tick, first of a process": 1.0, "sensor tick, warm": 1.0}
TRACE_S = 5.0


@contextmanager
def s3_server(latency_s: float) -> Iterator[FaultyProxy]:
    """An S3 server with an empty bucket; this process and those that it starts use it through the proxy."""
    port = free_port()
    moto = Path(sys.executable).parent / "moto_server"
    server = subprocess.Popen([str(moto), "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)
    try:
        endpoint = f"http://127.0.0.1:{port}"
        _wait_for(endpoint)
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        import boto3

        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
        proxy = FaultyProxy(endpoint, 0, latency_s=latency_s)
        with proxy.running() as url:
            os.environ["AWS_ENDPOINT_URL"] = url
            yield proxy
        print(f"the S3 server used {_peak_mb(server.pid):,.0f} MB", flush=True)
    finally:
        server.terminate()
        server.wait()


def _wait_for(endpoint: str) -> None:
    until = time.monotonic() + 120.0
    while time.monotonic() < until:
        with suppress(OSError), urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=5.0):
            return
        time.sleep(0.2)
    raise SystemExit(f"{endpoint}: the S3 server does not answer")


def _peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return float(status.partition("VmHWM:")[2].split()[0]) / 1024


# --- questions, each asked in a process of its own


def ask_store(home: Path) -> None:
    """Store a project that has no copy yet."""
    from rft_platform.object_store.mirror import open_mirror

    mirror = open_mirror(home, URL)
    mirror.take_over()
    with mirror.driving():  # stores everything at its end
        pass


def ask_take_over(home: Path) -> None:
    """Continue the stored project in an empty home: what precedes its first tick."""
    from rft_platform.object_store.mirror import open_mirror

    open_mirror(home, URL).take_over()


def ask_note(home: Path) -> None:
    """Store the note of a stage."""
    from rft_platform.experience.store import ExperienceStore

    store = ExperienceStore(home / "rounds")
    store.write_note(store.rounds()[-1], "progress", {"at": time.time()})


def measure_all(
    writer: Path, proxy: FaultyProxy, ask: Callable[[str, Path, str, int], dict[str, Any]], targets: dict[str, str]
) -> dict[str, Any]:
    """Every question to both homes: ``ask`` measures one, given a name, the home, what to run, and how often."""

    def counted(name: str, home: Path, what: str, times: int) -> dict[str, Any]:
        proxy.traffic.clear()
        found = ask(name, home, what, times)
        requests = {kind: round(count / times, 1) for kind, count in sorted(proxy.traffic.items())}
        print(f"    each: {requests}", flush=True)
        return {**found, "each": requests}

    found: dict[str, Any] = {"store the whole project": counted("store the whole project", writer, "store", 1)}
    empty = writer.with_name("empty")
    shutil.rmtree(empty, ignore_errors=True)
    empty.mkdir()
    first, *others = targets.items()
    for home, root in (("writer", writer), ("empty", empty)):  # after the take-over the writer stores no more
        print(f"the home that {'wrote the project' if home == 'writer' else 'takes it over'}", flush=True)
        asked = [("take over", "take over")] if home == "empty" else []
        asked += [(name, name) for name in LIMITS_S]
        asked += [(f"{name}, first", f"trace {target}") for name, target in (first, *others)]
        asked += [(f"{first[0]}, later", f"trace {first[1]}"), ("store a note", "note")]
        found[home] = {name: counted(name, root, what, 1) for name, what in asked}
    shutil.rmtree(empty)
    return found


def missed(found: dict[str, Any]) -> list[str]:
    """The questions that took longer than is demanded."""
    late = []
    for home in ("writer", "empty"):
        for name, answer in found[home].items():
            limit = TRACE_S if name.startswith("rft trace") else LIMITS_S.get(name, float("inf"))
            if answer["slowest_s" if name in LIMITS_S else "median_s"] > limit:
                late.append(f"{home}: {name}")
    return late
