"""Random requests for every route of the online service's OpenAPI document: none is answered with a 5xx."""

from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from rft_platform.online.gateway.app import CommitRule, build_app
from rft_platform.online.gateway.proxy import GatewayCounts
from rft_platform.online.gateway.release_routes import release_routes
from rft_platform.online.releases.commands import ReleaseCommands, ServableVersion
from rft_platform.online.releases.store import ReleaseStore
from rft_platform.online.traffic.database import open_database
from rft_platform.online.traffic.incoming import NewCall
from rft_platform.online.traffic.reader import TrafficReader
from rft_platform.online.traffic.store import TrafficStore
from rft_platform.online.traffic.writer import TrafficWriter
from tests.fuzz.bodies import ODD_STRINGS, Bodies

COUNT = 1500
IDS = [f"m{number}" for number in range(20)]
WORDS = [*(text for text in ODD_STRINGS if "\ud83d" not in text and "\udc00" not in text), "json", "0", "1", "-1", "2"]


class ServiceBodies(Bodies):
    """Bodies for the service's own routes, which often name known answers and tasks."""

    def _keep_small(self, body: Any, random: Random) -> None:
        if isinstance(body, dict):
            for name, values in (("msg_ids", [random.choices(IDS, k=2)]), ("reward", [0, 1.5]), ("version", [0, 1])):
                if name in body or random.random() < 0.1:
                    body[name] = random.choice(values)


def service(folder: Path) -> tuple[Any, TrafficWriter]:
    """The application before a database with calls, and its writer."""
    engine = open_database(f"sqlite:///{folder / 'traffic.db'}")
    store = TrafficStore(engine)
    store.record([NewCall(name, choice, {"x": 1}, 1, 5, 0.0) for name in IDS for choice in range(2)])
    writer = TrafficWriter(store)

    async def health() -> dict[str, Any]:
        return {}

    gateway: Any = SimpleNamespace(tenant_of=lambda _: "", counts=lambda _: GatewayCounts(), engine_health=health)
    versions = [ServableVersion(number, number, str(number), True, {}) for number in range(3)]
    releases = ReleaseCommands(ReleaseStore(engine), lambda: versions)
    routes = [release_routes(releases, writer, reader := TrafficReader(), lambda _: "")]
    return build_app(gateway, writer, reader, CommitRule(2), routes=routes), writer


def address(document: dict[str, Any], random: Random) -> str:
    """The path of a random GET route, with random parameters."""
    path = random.choice([path for path, routes in document["paths"].items() if "get" in routes])
    given = document["paths"][path]["get"].get("parameters", [])
    words = {each["name"]: quote(random.choice(WORDS)[:300], safe="") for each in given}
    query = "&".join(f"{each['name']}={words[each['name']]}" for each in given if each["in"] == "query")
    for name, word in words.items():
        path = path.replace(f"{{{name}}}", word or "0")
    return f"{path}?{query}" if query and random.random() < 0.9 else path


async def attack_service(folder: Path, count: int) -> tuple[Counter[int], list[str]]:
    """Send ``count`` random requests; the statuses, and what was answered with a 5xx."""
    app, writer = service(folder)
    statuses, failures = Counter[int](), list[str]()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        document = (await client.get("/openapi.json")).json()
        bodies = ServiceBodies(document, "m")
        for seed in range(count):
            random = Random(seed)
            if random.random() < 0.2:
                answer = await client.get(path := address(document, random))
            else:
                path, body = bodies.make(random)
                answer = await client.post(path, content=body, headers={"content-type": "application/json"})
            statuses[answer.status_code] += 1
            if answer.status_code >= 500:
                failures.append(f"seed {seed}, {path}: {answer.text[:300]}")
    writer.close()
    return statuses, failures


@pytest.mark.slow
async def test_the_service_never_fails_on_a_request(tmp_path) -> None:
    statuses, failures = await attack_service(tmp_path, COUNT)
    assert failures == []
    assert statuses[200] > 100 < statuses[400]
