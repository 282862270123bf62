"""AgentScope's agent with an answer of a given form: it changes ``tool_choice`` as it goes."""

import sys
from pathlib import Path
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.tool import Toolkit
from pydantic import BaseModel

from rft_platform.rollout.workflow import WorkflowOutput

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "agentscope_react"))

from agent import calculator


class Number(BaseModel):
    """The answer."""

    value: int


async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Answer the task's question by a number."""
    toolkit = Toolkit()
    toolkit.register_tool_function(calculator)
    agent = ReActAgent("agent", "Use the calculator.", model, OpenAIChatFormatter(), toolkit, max_iters=4)
    agent.set_console_output_enabled(False)
    message = await agent.reply(Msg("user", task["question"], "user"), structured_model=Number)
    return WorkflowOutput(
        response=message.metadata, metrics={"value": float((message.metadata or {}).get("value", -1))}
    )
