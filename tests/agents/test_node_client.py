"""OpenAI's official client for Node through the gateway: whole and streamed answers, feedback, commit, errors."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rft_platform.inference.interface import PolicyEngine
from rft_platform.online.traffic.database import COMMITTED
from tests.online.gateway.test_service import Service

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "openai_node"
KEY = "node-key-of-16-characters"


@pytest.fixture
def node() -> str:
    """The interpreter, or skip."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("no Node.js on this machine (Debian: nodejs and npm, version 20 or later)")
    if not (EXAMPLE / "node_modules" / "openai").is_dir():
        pytest.skip(
            "examples/openai_node/node_modules is not made (make test-agents, or examples/openai_node/setup.sh)"
        )
    return found


def run(node: str, url: str, key: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "RFT_API_KEY": key, "NO_PROXY": "127.0.0.1"}
    command = [node, str(EXAMPLE / "client.mjs"), url, "What is 12*7?"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_client_for_node_is_served_recorded_and_rated(
    policy_engine: PolicyEngine, tmp_path: Path, node: str
) -> None:
    service = Service(policy_engine, tmp_path, keys={KEY: "shop"})
    try:
        done = run(node, service.url, KEY)
        refused = run(node, service.url, "wrong-key-of-16-characters")
    finally:
        service.close()
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    answer, streamed = said["answer"], said["streamed"]
    assert answer["object"] == "chat.completion" and answer["choices"][0]["message"]["role"] == "assistant"
    assert said["version"] == str(policy_engine.status().policy_version)
    assert len(streamed["parts"]) > 1 and streamed["finish_reason"] in ("stop", "length")
    assert streamed["usage"]["completion_tokens"] > 0
    assert said["feedback"]["matched"] == 2 and said["committed"]["committed"] == 2
    assert said["models"] != []
    calls = {call.msg_id: call for call in service.store.calls([answer["id"], streamed["id"]])}
    assert {call.state for call in calls.values()} == {COMMITTED} and {call.tenant for call in calls.values()} == {
        "shop"
    }
    assert calls[answer["id"]].conversation == "node-1"
    whole = calls[streamed["id"]].model_call["response"]["content"]
    assert whole == "".join(streamed["parts"])
    assert refused.returncode != 0 and "AuthenticationError: 401" in refused.stderr
