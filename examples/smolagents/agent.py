"""A tool-calling agent of smolagents. It knows nothing of training."""

import operator
import re

from smolagents import EMPTY_PROMPT_TEMPLATES, LogLevel, Model, ToolCallingAgent, tool

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

PROMPTS = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Use the calculator, then give the final answer."}


@tool
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


def answer(model: Model, question: str) -> str:
    """What the agent gives as its final answer."""
    agent = ToolCallingAgent(
        tools=[calculator], model=model, prompt_templates=PROMPTS, max_steps=4, verbosity_level=LogLevel.OFF
    )
    return str(agent.run(question))
