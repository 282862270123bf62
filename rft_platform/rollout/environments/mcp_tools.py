"""Tools of an MCP server as an environment: one session for each episode, over HTTP or with its own process.

The server only runs tools. It gives no reward and never ends an episode: use a judge for the answer.
"""

import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import IO, Any

from rft_platform.common.errors import UserError
from rft_platform.rollout.environments.interface import Action, ToolCall, Turn

_TAIL_BYTES, _TAIL_LINES = 4096, 3  # of what a command printed to stderr, for the message of a failure


class McpEnvironment:
    """An episode with the tools of the server at a URL (``http://HOST/mcp``), or of a command that speaks over stdio.

    Args:
        tools: names of the tools that the model gets; None: all.
        env: names of environment variables that the command gets, besides the few that MCP passes on by default.
        timeout_s: longest wait for an answer of the server.
    """

    def __init__(
        self,
        server: str,
        *,
        tools: Sequence[str] | None = None,
        env: Sequence[str] = (),
        timeout_s: float = 60.0,
    ) -> None:
        if not server.strip():
            raise UserError("environment 'mcp:': expected an address or a command, as in mcp:http://127.0.0.1:8000/mcp")
        _mcp()
        if unset := [name for name in env if name not in os.environ]:
            raise UserError(f"environment 'mcp:{server}': the environment variables {unset} are not set")
        self._server, self._names, self._env, self._timeout_s = server, tools, env, timeout_s
        self._stack = AsyncExitStack()
        self._client: Any = None
        self._stderr: IO[str] | None = None  # of a command
        self._tools: list[dict[str, Any]] = []

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """The server's tools."""
        return self._tools

    async def reset(self, row: Mapping[str, Any]) -> Turn:
        """Open a session and ask for the tools. The observation is empty: the task's prompt says what to do."""
        client = _mcp().Client(self._target(), read_timeout_seconds=self._timeout_s)
        try:
            self._client = await self._stack.enter_async_context(client)
            self._tools = [_openai_tool(tool) for tool in await self._list_tools()]
        except Exception as error:
            reason = self._printed() or "does it run?"
            raise ConnectionError(f"MCP server {self._server}: no session ({_causes(error)}); {reason}") from error
        offered = [tool["function"]["name"] for tool in self._tools]
        if self._names is not None:
            if missing := sorted(set(self._names) - set(offered)):
                raise UserError(f"MCP server {self._server}: no tools {missing}; it has {sorted(offered)}")
            self._tools = [tool for tool in self._tools if tool["function"]["name"] in self._names]
        return Turn("")

    async def step(self, action: Action) -> Turn:
        """Call a tool. An unknown tool, wrong arguments and an error of the tool become text for the model.

        Raises ConnectionError if the server has ended.
        """
        assert isinstance(action, ToolCall), "an environment with tools gets only tool calls"
        assert self._client is not None, "reset comes first"
        if action.name not in {tool["function"]["name"] for tool in self._tools}:
            return Turn(f"error: unknown tool {action.name}", valid=False)
        try:
            result = await self._client.call_tool(action.name, dict(action.arguments))
        except _mcp().MCPError as error:
            if error.code == _mcp().types.CONNECTION_CLOSED:
                reason = self._printed() or "did it end?"
                raise ConnectionError(f"MCP server {self._server}: the session ended; {reason}") from error
            return Turn(f"error: {error}", valid=False)
        text = "\n".join(block.text for block in result.content if block.type == "text")
        return Turn(text, valid=not result.is_error)

    async def close(self) -> None:
        """End the session and the process of a command."""
        await self._stack.aclose()

    def _target(self) -> Any:
        if self._server.startswith(("http://", "https://")):
            return self._server
        command, *arguments = shlex.split(self._server)
        own = {name: os.environ[name] for name in self._env}
        file = tempfile.TemporaryFile("a+", encoding="utf-8", errors="replace")  # noqa: SIM115 - open as long as the session
        self._stderr = self._stack.enter_context(file)
        command_line = _mcp().StdioServerParameters(command=command, args=arguments, env=own)
        return _mcp().stdio_client(command_line, errlog=self._stderr)

    def _printed(self) -> str:
        """The last lines that a command printed to stderr, in one line; empty without any."""
        if self._stderr is None:
            return ""
        self._stderr.seek(max(os.fstat(self._stderr.fileno()).st_size - _TAIL_BYTES, 0))
        lines = [line.strip() for line in self._stderr.read().splitlines() if line.strip()]
        return f"it printed: {' | '.join(lines[-_TAIL_LINES:])}" if lines else ""

    async def _list_tools(self) -> list[Any]:
        assert self._client is not None
        page = await self._client.list_tools()
        found = list(page.tools)
        while page.next_cursor is not None:
            page = await self._client.list_tools(cursor=page.next_cursor)
            found += page.tools
        return found


def _openai_tool(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
    return {"type": "function", "function": function}


def _causes(error: BaseException) -> str:
    """The innermost messages: the SDK's tasks raise groups of exceptions."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_causes(each) for each in error.exceptions)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _mcp() -> Any:
    try:
        import mcp
    except ImportError:
        raise UserError(
            "environments of MCP servers need the package mcp, version 2: pip install 'rft-platform[mcp]'"
        ) from None
    if not hasattr(mcp, "Client"):
        raise UserError("environments of MCP servers need version 2 of the package mcp: pip install 'mcp>=2,<3'")
    return mcp
