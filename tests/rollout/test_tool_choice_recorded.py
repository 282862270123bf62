"""With ``tool_choice`` none a model is shown no tools, and the record says so: messages and tools give the prompt."""

from typing import Any

import pytest

from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.workflows.calculator import CALCULATOR_TOOL


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_recorded_tools_are_those_in_the_prompt(policy_engine: PolicyEngine, choice: str) -> None:
    messages: Any = [{"role": "user", "content": "12+34?"}]
    history = RunHistory(policy_engine.status().model_path, SamplingParams(max_tokens=4), seed=1)
    async with RecordingClients(policy_engine.base_url, timeout_s=60, api_key=policy_engine.api_key).async_client(
        history
    ) as client:
        create: Any = client.chat.completions.create
        await create(model="policy", messages=messages, tools=[CALCULATOR_TOOL], tool_choice=choice)
    (call,) = history.calls()
    assert call.tools == ([CALCULATOR_TOOL] if choice == "auto" else [])
    assert policy_engine.render([call.messages], call.tools or None) == [call.prompt_ids]
