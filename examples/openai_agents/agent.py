"""An agent of the OpenAI Agents SDK. It knows nothing of training."""

import operator
import re

from agents import Agent, Model, Runner, function_tool

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@function_tool
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
    agent = Agent(name="Calculator", instructions="Use the calculator.", tools=[calculator], model=model)
    result = await Runner.run(agent, question, max_turns=5)
    return str(result.final_output)
