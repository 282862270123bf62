"""A ReAct agent of AgentScope with a calculator. It knows nothing of training."""

import operator
import re

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import ChatModelBase
from agentscope.tool import Toolkit, ToolResponse

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculator(expression: str) -> ToolResponse:
    """Compute with two whole numbers.

    Args:
        expression (`str`): two numbers with +, - or * between them, as in 12*34.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*", expression)
    if match is None:
        result = "error: expected two numbers with +, - or * between them, as in 12*34"
    else:
        left, operation, right = match.groups()
        result = str(OPERATIONS[operation](int(left), int(right)))
    return ToolResponse(content=[TextBlock(type="text", text=result)])


def make_toolkit() -> Toolkit:
    """The agent's tools."""
    toolkit = Toolkit()
    toolkit.register_tool_function(calculator)
    return toolkit


async def answer(model: ChatModelBase, question: str) -> Msg:
    """The agent's last message."""
    agent = ReActAgent(
        name="react_agent",
        sys_prompt="Use the calculator.",
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=make_toolkit(),
        max_iters=4,
    )
    agent.set_console_output_enabled(False)
    return await agent.reply(Msg("user", question, role="user"))
