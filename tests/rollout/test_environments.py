"""Environments: Gymnasium, OpenEnv servers and own classes behind one interface, and the workflow that plays them."""

import asyncio
import json
import shutil
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

from rft_platform.common.errors import UserError
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.environments.interface import Action, ToolCall, Turn
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.rollout.workflow import resolve_workflow
from rft_platform.rollout.workflows.environment import EnvironmentWorkflow, make_environment
from rft_platform.tasks.task import Task

from .fake_engine import FakeEngine

LAKE = {"actions": ["left", "down", "right", "up"], "is_slippery": False, "map_name": "4x4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
closed: list[str] = []


class Countdown:
    """Ends when the numbers that the model says reach zero; ``bump`` adds to the count by a tool."""

    def __init__(self, start: int = 3, with_tools: bool = False) -> None:
        self.count = int(start)
        if with_tools:
            self.tools = [TOOL]

    async def reset(self, row: Mapping[str, Any]) -> Turn:
        self.count += int(row.get("seed", 0))
        if row.get("broken"):
            raise RuntimeError("this row cannot be played")
        return Turn(f"count {self.count}")

    async def step(self, action: Action) -> Turn:
        if isinstance(action, ToolCall):
            self.count += int(action.arguments["by"])
            return Turn(f"count {self.count}", 0.25, self.count <= 0, metrics={"tool_uses": 1.0})
        if not action.strip().isdigit():
            return Turn("say a number", valid=False)
        self.count -= int(action)
        return Turn(f"count {self.count}", float(self.count <= 0), done=self.count <= 0)

    async def close(self) -> None:
        closed.append("countdown")


def openenv_app() -> FastAPI:
    """An OpenEnv server (protocol of openenv-core 0.3): each session counts down from its seed."""
    app = FastAPI()

    @app.websocket("/ws")
    async def session(connection: WebSocket) -> None:
        await connection.accept()
        left = 0
        try:
            while True:
                message = json.loads(await connection.receive_text())
                data, kind = message.get("data", {}), message["type"]
                if kind == "close":
                    break
                if kind == "step" and not str(data.get("message", "")).strip().isdigit():
                    error = {"message": "message must be a number", "code": "VALIDATION_ERROR"}
                    await connection.send_text(json.dumps({"type": "error", "data": error}))
                    continue
                left = int(data.get("seed", 3)) if kind == "reset" else left - int(data["message"])
                done = kind == "step" and left <= 0
                shown = {"text": f"count {left}", "metadata": {}}
                answer = {"observation": shown, "reward": float(done) if kind == "step" else None, "done": done}
                await connection.send_text(json.dumps({"type": "observation", "data": answer}))
        except WebSocketDisconnect:
            pass
        closed.append("session")

    return app


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a running OpenEnv server."""
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(openenv_app(), log_config=None, ws="websockets-sansio"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.should_exit = True
    thread.join(10)


@pytest.fixture(params=["own class", "gymnasium", "openenv"])
def played(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any], Sequence[str]]:
    """Name, arguments, and the actions that end an episode of seed 3."""
    if request.param == "gymnasium":
        pytest.importorskip("gymnasium", reason="needs the package gymnasium")
        return "gymnasium:FrozenLake-v1", LAKE, ("down", "down", "right", "right", "down", "right")
    if request.param == "openenv":
        address = request.getfixturevalue("server")
        return f"openenv:{address}", {"observation_key": "text"}, ("1", "2")
    return f"{__name__}:Countdown", {"start": 0}, ("1", "2")


async def test_an_episode_starts_ends_and_is_repeatable(played: tuple[str, dict[str, Any], Sequence[str]]) -> None:
    name, args, actions = played
    shown = []
    for _ in range(2):
        environment = make_environment(name, args)
        try:
            turns = [await environment.reset({"seed": 3})]
            assert not turns[0].done and turns[0].observation
            turns += [await environment.step(action) for action in actions]
        finally:
            await environment.close()
        assert [turn.done for turn in turns] == [False] * len(actions) + [True]
        assert [turn.reward for turn in turns] == [0.0] * len(actions) + [1.0]
        assert all(turn.valid for turn in turns)
        shown.append([turn.observation for turn in turns])
    assert shown[0] == shown[1]


async def test_sessions_do_not_share_their_state(played: tuple[str, dict[str, Any], Sequence[str]]) -> None:
    name, args, actions = played
    one, two = make_environment(name, args), make_environment(name, args)
    try:
        start = await one.reset({"seed": 3})
        await two.reset({"seed": 3})
        for action in actions[:-1]:
            await one.step(action)
        assert not (await two.step(actions[0])).done
        assert (await one.step(actions[-1])).done
        assert start.observation
    finally:
        await one.close()
        await two.close()


async def test_a_gymnasium_lake_is_rendered_and_takes_the_last_named_action() -> None:
    pytest.importorskip("gymnasium", reason="needs the package gymnasium")
    environment = make_environment("gymnasium:FrozenLake-v1", LAKE)
    first = await environment.reset({"seed": 0})
    assert first.observation == "[S]FFF\nFHFH\nFFFH\nHFFG"
    moved = await environment.step("Not left: I go RIGHT.")
    assert moved.observation.splitlines()[1:] == ["S[F]FF", "FHFH", "FFFH", "HFFG"] and "Right" in moved.observation
    assert moved.state == "S[F]FF\nFHFH\nFFFH\nHFFG" and first.state == first.observation
    lost = await environment.step("hello")
    assert not lost.valid and lost.observation == "No valid action. Choose one of: left, down, right, up."
    fallen = await environment.step("down")
    assert fallen.done and fallen.reward == 0
    await environment.close()


async def test_a_cell_of_a_gymnasium_lake_is_one_state_whatever_the_last_move_was() -> None:
    pytest.importorskip("gymnasium", reason="needs the package gymnasium")
    met = []
    for moves in (["right", "left"], ["down", "up"], []):
        environment = make_environment("gymnasium:FrozenLake-v1", LAKE)
        turns = [await environment.reset({"seed": 0}), *[await environment.step(move) for move in moves]]
        met.append((turns[-1].observation, turns[-1].state))
        await environment.close()
    assert len({observation for observation, _ in met}) == 3 and len({state for _, state in met}) == 1


async def test_actions_of_gymnasium_may_have_names_of_several_words() -> None:
    pytest.importorskip("gymnasium", reason="needs the package gymnasium")
    environment = make_environment(
        "gymnasium:FrozenLake-v1", {**LAKE, "actions": ["go left", "go down", "go", "Go UP"]}
    )
    await environment.reset({"seed": 0})
    moved = await environment.step("I will not go. I GO DOWN!")
    assert moved.valid and moved.observation.splitlines()[2] == "[F]HFH"
    assert not (await environment.step("gone, ego, let-go, go-left")).valid
    await environment.close()


async def test_a_slow_step_of_gymnasium_does_not_stop_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium", reason="needs the package gymnasium")
    environment: Any = make_environment("gymnasium:FrozenLake-v1", LAKE)
    await environment.reset({"seed": 0})
    go_on, step = threading.Event(), environment._env.step
    monkeypatch.setattr(environment._env, "step", lambda action: (go_on.wait(5), step(action))[1])
    moving = asyncio.ensure_future(environment.step("right"))
    await asyncio.sleep(0.01)
    assert not moving.done()
    go_on.set()
    assert (await moving).valid
    await environment.close()


@pytest.mark.parametrize(
    ("name", "args", "match"),
    [
        ("gymnasium:NoSuchLake-v0", {}, "gymnasium:NoSuchLake-v0"),
        ("gymnasium:FrozenLake-v1", {"actions": ["left"]}, "expected 4 names"),
        ("gymnasium:FrozenLake-v1", {"actions": ["left", "down", "right", " "]}, "expected 4 names"),
        ("gymnasium:FrozenLake-v1", {"size": 3}, "gymnasium:FrozenLake-v1"),
        ("gymnasium:Pendulum-v1", {}, "expected Discrete or Text"),
        ("openenv:127.0.0.1:8000", {}, "expected the address of a server"),
        ("openenv:http://127.0.0.1:1", {"colour": 1}, "environment_args .'colour'. do not fit"),
        ("no_such_module:Env", {}, "cannot import no_such_module"),
        ("json:JSONDecoder", {}, "has no reset, step, close"),
        (f"{__name__}:Countdown", {"start": None}, r"constructor raised TypeError: .*\(.*test_environments.py:\d+\)"),
    ],
)
def test_what_cannot_be_made_is_refused_before_a_run(name: str, args: dict[str, Any], match: str) -> None:
    if name.startswith("gymnasium:"):
        pytest.importorskip("gymnasium", reason="needs the package gymnasium")
    with pytest.raises(UserError, match=match):
        resolve_workflow("environment", {"environment": name, "environment_args": args})


def test_max_turns_is_checked() -> None:
    with pytest.raises(UserError, match="max_turns 0"):
        EnvironmentWorkflow(f"{__name__}:Countdown", max_turns=0)


def played_rows(engine: FakeEngine, workflow: Any, row: dict[str, Any], prompt: str = "") -> Any:
    task = Task("t", "set", prompt, None, row)
    return run_rollouts(
        engine, [task], workflow, round=1, batch=0, repeat_times=1, sampling=SamplingParams(max_tokens=64)
    )


def test_the_workflow_plays_until_the_environment_ends_the_episode(engine: FakeEngine, server: str) -> None:
    for name, args in ((f"{__name__}:Countdown", {}), (f"openenv:{server}", {"observation_key": "text"})):
        engine.text = "1"
        workflow = resolve_workflow("environment", {"environment": name, "environment_args": args}, "Count down.")
        batch = played_rows(engine, workflow, {} if args == {} else {"seed": 3}, prompt="Reach zero.")
        rows = batch.rows
        assert len(rows) == 3 and rows[-1].run_reward == 1.0 and rows[-1].run_output == "count 0"
        assert [row.call.step_reward for row in rows] == [0.0, 0.0, 1.0]
        assert rows[-1].call.metrics == {"turns": 3.0, "invalid_actions": 0.0, "finished": 1.0}
        assert [message["content"] for message in rows[0].messages] == ["Count down.", "Reach zero.\n\ncount 3"]
        assert [message["content"] for message in rows[2].messages][-2:] == ["1", "count 1"]
        assert len({row.call.env_state_hash for row in rows}) == 3


def test_invalid_actions_are_counted_and_turns_are_limited(engine: FakeEngine) -> None:
    engine.text = "zero"
    workflow = EnvironmentWorkflow(f"{__name__}:Countdown", max_turns=4, invalid_reward=-0.5)
    rows = played_rows(engine, workflow, {}).rows
    assert len(rows) == 4 and rows[-1].run_reward == -2.0
    assert rows[-1].call.metrics == {"turns": 4.0, "invalid_actions": 4.0, "finished": 0.0}
    assert rows[-1].run_output == "say a number" and len({row.call.env_state_hash for row in rows}) == 1


def test_an_environment_is_closed_after_an_error_too(engine: FakeEngine) -> None:
    from rft_platform.common.errors import UserCodeError

    closed.clear()
    with pytest.raises(UserCodeError, match="this row cannot be played"):
        played_rows(engine, EnvironmentWorkflow(f"{__name__}:Countdown"), {"broken": True})
    assert closed and set(closed) == {"countdown"}


def test_a_server_that_is_gone_or_refuses_fails_the_run_with_its_address(engine: FakeEngine, server: str) -> None:
    from rft_platform.common.errors import UserCodeError

    engine.text = "zero"
    with pytest.raises(UserCodeError, match="step was refused: message must be a number"):
        played_rows(engine, EnvironmentWorkflow(f"openenv:{server}"), {"seed": 3})
    with pytest.raises(UserCodeError, match=r"ws://127.0.0.1:1/ws: no connection .*is it running"):
        played_rows(engine, EnvironmentWorkflow("openenv:http://127.0.0.1:1"), {})


class Scripted:
    """A model that says what a test wrote."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers, self.asked, self.rewards = list(answers), list[list[dict[str, Any]]](), list[float]()
        self.states: list[Any] = []

    async def chat(self, messages: list[dict[str, Any]], tools: Any = None) -> dict[str, Any]:
        assert tools == [TOOL]
        self.asked.append(messages)
        return self.answers.pop(0)

    def set_env_state(self, state: Any) -> None:
        self.states.append(state)

    def give_step_reward(self, value: float) -> None:
        self.rewards.append(value)


def calling(*arguments: str) -> dict[str, Any]:
    calls = [{"id": f"c{i}", "function": {"name": "add", "arguments": given}} for i, given in enumerate(arguments)]
    return {"role": "assistant", "tool_calls": calls}


async def test_tools_of_an_environment_are_called_until_the_model_answers_without_one() -> None:
    model: Any = Scripted(calling('{"by": 2}', "no json"), {"role": "assistant", "content": "done"})
    workflow = EnvironmentWorkflow(f"{__name__}:Countdown", {"with_tools": True})
    output = await workflow.run(Task("t", "set", "", None, {}), model)
    assert output.reward == 0.25 and model.rewards == [0.25, 0.0]
    assert output.metrics == {"tool_uses": 1.0, "turns": 2.0, "invalid_actions": 1.0, "finished": 0.0}
    results = [message for message in model.asked[1] if message["role"] == "tool"]
    assert [(m["tool_call_id"], m["content"]) for m in results] == [
        ("c0", "count 5"),
        ("c1", "error: the arguments are no JSON object"),
    ]


async def test_the_output_of_a_tool_is_never_the_response() -> None:
    workflow = EnvironmentWorkflow(f"{__name__}:Countdown", {"with_tools": True}, max_turns=2)
    task = Task("t", "set", "", None, {})
    for content in ("I add again", None):
        model: Any = Scripted(calling('{"by": 2}'), calling('{"by": 2}') | {"content": content})
        assert (await workflow.run(task, model)).response == (content or "")
    ended: Any = Scripted(calling('{"by": -3}', '{"by": 1}', "no json"))
    output = await workflow.run(task, ended)
    assert output.response == "count 0" and output.metrics["finished"] == 1.0 and ended.rewards == [0.25]


async def test_the_state_is_that_of_the_last_valid_action() -> None:
    model: Any = Scripted(calling('{"by": 2}'), calling("no json"), calling('{"by": 1}'), {"content": "done"})
    await EnvironmentWorkflow(f"{__name__}:Countdown", {"with_tools": True}).run(Task("t", "set", "", None, {}), model)
    assert model.states == ["count 3", "count 5", "count 5", "count 6"]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("alfworld:eval", r"pip install alfworld .* alfworld-download, then write a class"),
        ("WebShop", r"PyPI's package webshop is not the shop: clone github.com/princeton-nlp/WebShop"),
        ("harbor:tasks", "examples/harbor"),
        ("verifiers:gsm8k", "examples/verifiers"),
    ],
)
def test_environments_that_are_not_built_in_are_refused_with_advice(name: str, advice: str) -> None:
    with pytest.raises(UserError, match=rf"environment '{name}' is not built in: .*{advice}"):
        make_environment(name, {})


def test_scienceworld_names_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scienceworld", None)
    with pytest.raises(UserError, match=r"needs the package scienceworld .*'rft-platform\[scienceworld\]'\) and Java"):
        make_environment("scienceworld:boil", {})
    monkeypatch.setitem(sys.modules, "scienceworld", ModuleType("scienceworld"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="no program java on the PATH"):
        make_environment("scienceworld:boil", {})


@pytest.mark.slow
async def test_an_episode_of_scienceworld() -> None:
    pytest.importorskip("scienceworld", reason="needs the package scienceworld: pip install scienceworld")
    if shutil.which("java") is None:
        pytest.skip("no program java on this machine")
    starts = []
    for split in ("train", "test"):
        episode = make_environment("scienceworld:boil", {"split": split, "simplifications": "easy", "max_moves": 3})
        try:
            starts.append((await episode.reset({"seed": 31})).observation)
            assert not (await episode.step("I think\nfly to the moon")).valid
            turn = await episode.step("look around")
            assert turn.valid and turn.metrics == {"score": 0.0} and turn.observation.startswith("This ")
        finally:
            await episode.close()
    assert starts[0] != starts[1] and starts[0].startswith("Your task is to boil")
