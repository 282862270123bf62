"""Tools of real MCP servers as an environment: over HTTP, and a process for each episode."""

import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn

from rft_platform.common.errors import UserError
from rft_platform.rollout.environments.interface import Environment, ToolCall
from rft_platform.rollout.workflows.environment import EnvironmentWorkflow, make_environment
from rft_platform.tasks.task import Task

pytest.importorskip("mcp", reason="needs the package mcp")

SERVER = '''"""A server with a counter for each process."""
import os

from mcp.server import MCPServer

server = MCPServer("counter")
total = 0


@server.tool()
def add(by: int) -> str:
    """Add to the counter."""
    global total
    total += by
    return f"count {total}"


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("not shown to clients")


@server.tool()
def variable() -> str:
    """The variable."""
    return os.environ.get("COUNTER_SECRET", "none")


if __name__ == "__main__":
    server.run()
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server as a file."""
    path = tmp_path_factory.mktemp("mcp") / "counter.py"
    path.write_text(SERVER)
    return path


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of the server over HTTP."""
    content: dict[str, Any] = {"__name__": "counter"}
    exec(SERVER, content)
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(content["server"].streamable_http_app(), log_config=None))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    running.should_exit = True
    thread.join(10)


@pytest.fixture(params=["http", pytest.param("command", marks=pytest.mark.slow)])
def name(request: pytest.FixtureRequest, script: Path) -> str:
    """The environment's name for each way to reach the server."""
    if request.param == "http":
        return f"mcp:{request.getfixturevalue('address')}"
    return f"mcp:{sys.executable} {script}"


@asynccontextmanager
async def episode(name: str, **args: Any) -> AsyncIterator[Environment]:
    """A started episode."""
    environment = make_environment(name, args)
    try:
        assert (await environment.reset({})).observation == ""
        yield environment
    finally:
        await environment.close()


async def test_the_tools_are_offered_and_called(name: str) -> None:
    async with episode(name) as environment:
        tools = {tool["function"]["name"]: tool["function"] for tool in environment.tools}
        assert set(tools) == {"add", "fail", "variable"}
        assert tools["add"]["description"] == "Add to the counter."
        assert tools["add"]["parameters"]["properties"]["by"]["type"] == "integer"
        before = await environment.step(ToolCall("add", {"by": 0}))
        after = await environment.step(ToolCall("add", {"by": 2}))
        assert before.valid and after.valid and not after.done and after.reward == 0
        assert int(after.observation.split()[1]) == int(before.observation.split()[1]) + 2


async def test_the_model_gets_errors_and_the_session_continues(name: str) -> None:
    async with episode(name) as environment:
        for call, told in (
            (ToolCall("subtract", {"by": 1}), "unknown tool subtract"),
            (ToolCall("add", {"by": "many"}), "by"),
            (ToolCall("add", {}), "by"),
            (ToolCall("fail", {}), "fail"),
        ):
            turn = await environment.step(call)
            assert not turn.valid and told in turn.observation, call
        assert (await environment.step(ToolCall("add", {"by": 1}))).valid


async def test_only_the_chosen_tools_are_offered(name: str) -> None:
    async with episode(name, tools=["add"]) as environment:
        assert [tool["function"]["name"] for tool in environment.tools] == ["add"]
        assert not (await environment.step(ToolCall("fail", {}))).valid
    with pytest.raises(UserError, match=r"no tools \['multiply'\]; it has \['add', 'fail', 'variable'\]"):
        async with episode(name, tools=["multiply"]):
            pass


@pytest.mark.slow
async def test_each_episode_has_a_process_that_ends_with_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTER_SECRET", "tulip")
    command = f"mcp:{sys.executable} {script}"
    async with episode(command, env=["COUNTER_SECRET"]) as one, episode(command) as two:
        children = psutil.Process().children()
        assert len(children) >= 2
        assert (await one.step(ToolCall("add", {"by": 5}))).observation == "count 5"
        assert (await two.step(ToolCall("add", {"by": 1}))).observation == "count 1"
        assert (await one.step(ToolCall("variable", {}))).observation == "tulip"
        assert (await two.step(ToolCall("variable", {}))).observation == "none"
    assert not any(child.is_running() for child in children if str(script) in " ".join(_command(child)))


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.mark.parametrize(
    ("server", "match"),
    [
        ("http://127.0.0.1:1/mcp", "MCP server http://127.0.0.1:1/mcp: no session"),
        ("/no/such/command --x", "MCP server /no/such/command --x: no session"),
        (f"{sys.executable} -c 'print(1)'", "no session"),
    ],
)
async def test_the_error_names_an_unreachable_server(server: str, match: str) -> None:
    with pytest.raises(ConnectionError, match=match):
        async with episode(f"mcp:{server}", timeout_s=10):
            pass


@pytest.mark.slow
async def test_what_a_failed_server_printed_is_shown(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("from mcp.server import FastMCP\n")
    with pytest.raises(
        ConnectionError, match=r"no session .*; it printed: .*ImportError: cannot import name 'FastMCP'"
    ):
        async with episode(f"mcp:{sys.executable} {broken}", timeout_s=20):
            pass


async def test_a_server_that_ends_within_an_episode_fails_the_run(tmp_path: Path) -> None:
    """The model must not be blamed for it."""
    ending = tmp_path / "ending.py"
    ending.write_text(
        SERVER.replace('raise ValueError("not shown to clients")', 'os.write(2, b"disk on fire"); os._exit(1)')
    )
    async with episode(f"mcp:{sys.executable} {ending}") as environment:
        with pytest.raises(ConnectionError, match=r"the session ended; it printed: .*disk on fire"):
            await environment.step(ToolCall("fail", {}))


def test_unset_variables_and_an_empty_name_are_refused(script: Path) -> None:
    assert "NO_SUCH_VARIABLE" not in os.environ
    with pytest.raises(UserError, match=r"environment variables \['NO_SUCH_VARIABLE'\] are not set"):
        make_environment(f"mcp:{sys.executable} {script}", {"env": ["NO_SUCH_VARIABLE"]})
    with pytest.raises(UserError, match="expected an address or a command"):
        make_environment("mcp: ", {})


class Caller:
    """A model that adds 4 and then says what it saw."""

    async def chat(self, messages: list[dict[str, Any]], tools: Any = None) -> dict[str, Any]:
        if messages[-1]["role"] == "tool":
            return {"role": "assistant", "content": f"I saw: {messages[-1]['content']}"}
        assert messages[-1]["content"] == "Count."
        function = {"name": "add", "arguments": '{"by": 4}'}
        return {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}

    def set_env_state(self, state: Any) -> None:
        pass

    def give_step_reward(self, value: float) -> None:
        pass


@pytest.mark.slow
async def test_the_response_of_a_run_is_the_answer_without_a_call(script: Path) -> None:
    workflow, model = EnvironmentWorkflow(f"mcp:{sys.executable} {script}"), Caller()
    output = await workflow.run(Task("t", "set", "Count.", None, {}), model)  # type: ignore[arg-type]
    assert output.response == "I saw: count 4"
    assert output.metrics == {"turns": 2.0, "invalid_actions": 0.0, "finished": 0.0}
