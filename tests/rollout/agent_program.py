"""Agents as their own programs, which read OPENAI_BASE_URL.

``openai``: one agent with the openai client. ``urllib FILE``: as many agents at once as FILE has lines ``key, text``,
with nothing but the standard library.
"""

import json
import os
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TOOLS: Any = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]


def with_openai() -> None:
    """Ask, call the tool that the model asks for, ask again (streamed), print the answer."""
    import openai

    messages: Any = [{"role": "user", "content": f"call: {sys.argv[2]}"}]
    with openai.OpenAI() as client:  # base URL and key from the environment, as any existing agent
        answer = client.chat.completions.create(model="gpt-4", messages=messages, tools=TOOLS)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        (call,) = answer.choices[0].message.tool_calls or []
        result = str(eval(json.loads(call.function.arguments)["expression"]))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        chunks = client.chat.completions.create(model="gpt-4", messages=messages, tools=TOOLS, stream=True)
        print("".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices))


def without_any_client(file: str) -> None:
    """Two turns of each agent, all at once."""

    def post(key: str, messages: list[Any]) -> Any:
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps({"model": "m", "messages": messages}).encode(),
            {"authorization": f"Bearer {key}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["message"]

    def agent(line: str) -> None:
        key, text = line.split(", ")
        messages: list[Any] = [{"role": "user", "content": text}]
        messages += [post(key, messages), {"role": "user", "content": f"again, {text}"}]
        post(key, messages)

    lines = Path(file).read_text().splitlines()
    with ThreadPoolExecutor(len(lines)) as pool:
        list(pool.map(agent, lines))


if __name__ == "__main__":
    with_openai() if sys.argv[1] == "openai" else without_any_client(sys.argv[2])
