"""An agent that is a bare loop over the OpenAI API. It knows nothing of training."""

import json
import operator
import re
from typing import Any

from openai import AsyncOpenAI

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Compute with two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "as in 12*34"}},
                "required": ["expression"],
            },
        },
    }
]


def calculator(expression: str) -> str:
    """The value of two whole numbers with +, - or * between them."""
    match = re.fullmatch(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*", expression)
    if match is None:
        return "error: expected two numbers with +, - or * between them, as in 12*34"
    left, operation, right = match.groups()
    return str(OPERATIONS[operation](int(left), int(right)))


async def answer(client: AsyncOpenAI, model: str, question: str, max_turns: int = 4) -> str:
    """Ask the model, run the tools it calls, and go on until it answers."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(max_turns):
        completion = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": run_tool(call.function)} for call in message.tool_calls
        ]
    return ""


def run_tool(function: Any) -> str:
    """What a tool call comes to; a call that makes no sense is told the model."""
    try:
        return {"calculator": calculator}[function.name](**json.loads(function.arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"
