"""An agent of AgentScope 2 with a calculator. It knows nothing of training."""

import operator
import re

from agentscope.agent import Agent, InjectionConfig, ReActConfig
from agentscope.message import Msg, UserMsg
from agentscope.model import ChatModelBase
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
ALLOWED = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="The calculator changes nothing.")


def calculator(expression: str) -> str:
    """Compute with two whole numbers.

    Args:
        expression: two numbers with +, - or * between them, as in 12*34.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*", expression)
    if match is None:
        return "error: expected two numbers with +, - or * between them, as in 12*34"
    left, operation, right = match.groups()
    return str(OPERATIONS[operation](int(left), int(right)))


async def answer(model: ChatModelBase, question: str) -> Msg:
    """The agent's last message."""
    agent = Agent(
        name="calculating_agent",
        system_prompt="Use the calculator.",
        model=model,
        toolkit=Toolkit(tools=[FunctionTool(calculator, permission=ALLOWED)]),
        react_config=ReActConfig(max_iters=4),
        injection_config=InjectionConfig(inject_runtime_state=False),  # the time in a prompt would differ between runs
    )
    return await agent.reply(UserMsg(name="user", content=question))
