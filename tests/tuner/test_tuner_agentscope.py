"""Real AgentScope agents on the model that a workflow gets, in an environment that has AgentScope.

They run where ``agentscope`` is installed beside the platform, or by the interpreter that RFT_AGENTSCOPE_PYTHON names
(examples/agentscope_tune/setup.sh makes such an environment).
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rft_platform.inference.interface import PolicyEngine

REPOSITORY = Path(__file__).resolve().parents[2]


def agentscope_python() -> str:
    """An interpreter with AgentScope, or skip."""
    if importlib.util.find_spec("agentscope") is not None:
        return sys.executable
    python = os.environ.get("RFT_AGENTSCOPE_PYTHON")
    if python is None:
        pytest.skip("needs AgentScope 1.x: install it here, or set RFT_AGENTSCOPE_PYTHON to an interpreter that has it")
    return python


@pytest.fixture(scope="module")
def seen(policy_engine: PolicyEngine) -> dict[str, Any]:
    """What the scenarios printed."""
    engine: Any = policy_engine
    environment = {
        **os.environ, "ENGINE": engine.url, "TOKEN": engine.address.token, "PYTHONPATH": str(REPOSITORY),
    }  # fmt: skip
    command = [agentscope_python(), "-m", "tests.tuner.agentscope_scenarios"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    results: dict[str, Any] = json.loads(line.removeprefix("RESULTS "))
    return results


@pytest.mark.parametrize("name", ["reply", "streamed"])
def test_an_agents_calls_are_recorded_token_for_token(seen: dict[str, Any], name: str) -> None:
    assert seen[name]["failed"] == 0, seen[name]["errors"]
    assert seen[name]["exact"] == {"prompts": True, "logprobs": True}
    assert [message["role"] for message in seen[name]["messages"]] == ["system", "user"]
    assert isinstance(seen[name]["messages"][0]["content"], list)  # as AgentScope sends it


def test_the_response_is_passed_as_a_message(seen: dict[str, Any]) -> None:
    assert seen["reply"]["response"] == ["Msg", True]
    assert all(metrics["letters"] > 0 for metrics in seen["reply"]["metrics"])


def test_sampling_is_the_tasksets_unless_a_call_names_its_own(seen: dict[str, Any]) -> None:
    assert (seen["reply"]["temperature"], seen["sampled"]["temperature"]) == (1.0, 0.5)
    assert seen["sampled"]["answer_tokens"] <= 3 < seen["reply"]["answer_tokens"]
    assert all(metrics["same_client"] == 1.0 for metrics in seen["sampled"]["metrics"])


def test_tools_are_called_and_every_call_is_a_step(seen: dict[str, Any]) -> None:
    facts = seen["with_tools"]
    assert (facts["failed"], facts["steps"]) == (0, [0, 1] * 3)
    roles = [message["role"] for message in facts["last_messages"]]
    assert roles == ["system", "user", "assistant", "tool"]
    assert facts["last_messages"][-1]["content"] == "1+1 is 9"


def test_structured_output_requires_the_tool_and_then_text(seen: dict[str, Any]) -> None:
    facts = seen["structured"]
    assert (facts["failed"], facts["steps"]) == (0, [0, 1] * 3)
    assert facts["tool_choices"] == ["none"] * 3 + ["required"] * 3
    assert facts["rewards"] == [None, 7.0] * 3  # the run's reward stands on its last step
    assert seen["parsed"]["rewards"] == [None, 7.0] * 3  # a model without JSON mode is asked by a forced tool call


def test_a_metric_of_agentscope_judges(seen: dict[str, Any]) -> None:
    assert seen["metric"] and all(reward == expected for reward, expected in seen["metric"])
