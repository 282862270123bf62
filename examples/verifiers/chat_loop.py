"""A harness: the conversation of the model and the task's tools, in this process.

verifiers' own harnesses (``bash``, ``null`` and those of coding agents) start a program for each rollout, and uv
downloads the program's packages. This one needs neither uv nor a network. As theirs, its calls go through verifiers'
interception server, which records them in the trace that the rewards read, and passes them on to the platform.
"""

import json
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatLoop"]


class ChatLoop(vf.Harness[vf.HarnessConfig]):
    """Ask, run the tools that the model calls, and go on until it calls none, or ``max_turns`` of the agent."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Hold the conversation."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        opening = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        )
        messages += opening
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0))
            tools, *connections = await connect_mcp(servers, stack)
            offered: dict[str, Any] = {"tools": tools} if tools else {}
            while trace.stop_condition is None:
                completion = await client.chat.completions.create(model=ctx.model, messages=messages, **offered)
                message = completion.choices[0].message
                if not message.tool_calls:
                    break
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls:
                    result = await tool_result(call.function, *connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def tool_result(function: Any, dispatch: dict[str, Any], servers: dict[str, Any]) -> Any:
    """What a call comes to; the model is told about a call that makes no sense."""
    try:
        return await call_mcp(servers, dispatch, function.name, json.loads(function.arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"
