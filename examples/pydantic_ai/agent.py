"""An agent of Pydantic AI. It knows nothing of training."""

import operator
import re

from pydantic_ai import Agent
from pydantic_ai.models import Model

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

agent = Agent(instructions="Use the calculator.")


@agent.tool_plain
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


async def answer(model: Model, question: str) -> str:
    """What the agent says in the end."""
    return (await agent.run(question, model=model)).output
