"""Dialogues with a simulated user: a function, or an auxiliary model."""

import asyncio
import threading
from typing import Any

import pytest

from rft_platform.common.errors import UserCodeError, UserError
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.runner.report import RolloutBatch
from rft_platform.rollout.workflow import resolve_workflow
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel, AuxiliarySpec
from rft_platform.rollout.workflows.dialogue import DialogueWorkflow

from .fake_engine import FakeEngine
from .samples import roll_out, tasks

HERE = __name__


def customer(messages: list[dict[str, Any]], task: dict[str, Any]) -> str | None:
    """Asks three times; the last answer is enough."""
    asked = len(messages) // 2
    return None if asked == 3 else f"{task['question']}, part {asked}"


async def examiner(messages: list[dict[str, Any]], model: ModelHandle) -> str:
    """Rewards each answer, and says the stop phrase after the second."""
    assert messages[-1]["role"] == "assistant"
    messages.append({"role": "user", "content": "not part of the conversation"})
    model.give_step_reward(0.5)
    return "that will do [DONE]" if len(messages) > 4 else "go on"


asked, go_on = threading.Event(), threading.Event()


def thoughtful(messages: list[dict[str, Any]]) -> str:
    """Waits for the test."""
    asked.set()
    assert go_on.wait(10), "the event loop of the caller does not run"
    return "and now?"


def wrong(message: str) -> None:
    """Not the parameters of a user."""


def explore(engine: FakeEngine, auxiliary: dict[str, Any] | None = None, **arguments: Any) -> RolloutBatch:
    workflow = resolve_workflow("dialogue", arguments, "be kind")
    settings: dict[str, Any] = {"round": 1, "batch": 0, "repeat_times": 1, "sampling": SamplingParams(max_tokens=64)}
    return roll_out(engine, tasks(1), workflow, **settings, max_retries=0, auxiliary_models=auxiliary)


def test_a_function_plays_the_user(engine: FakeEngine) -> None:
    rows = explore(engine, user=f"{HERE}:customer", opening="user").rows
    assert [row.step for row in rows] == [0, 1, 2]
    said = rows[-1].run_output
    assert [m["content"] for m in said if m["role"] == "user"] == [f"question 0, part {n}" for n in range(3)]
    assert [m["content"] for m in said if m["role"] == "assistant"] == [row.response["content"] for row in rows]
    assert rows[2].messages == [{"role": "system", "content": "be kind"}, *said[:-1]]
    assert rows[2].metrics == {"rounds": 3.0, "user_stopped": 1.0}


async def test_a_slow_function_does_not_stop_the_event_loop() -> None:
    class Echo:
        async def chat(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
            return {"role": "assistant", "content": "yes"}

    model: Any = Echo()
    asked.clear(), go_on.clear()
    run = asyncio.ensure_future(DialogueWorkflow(f"{HERE}:thoughtful", max_rounds=2).run(tasks(1)[0], model))
    assert await asyncio.to_thread(asked.wait, 5)
    assert not run.done()
    go_on.set()
    assert (await run).response[2] == {"role": "user", "content": "and now?"}


def test_rounds_are_bounded(engine: FakeEngine) -> None:
    rows = explore(engine, user=f"{HERE}:customer", max_rounds=2).rows
    assert len(rows) == 2 and rows[-1].metrics == {"rounds": 2.0, "user_stopped": 0.0}
    assert rows[0].messages[-1]["content"] == "question 0"  # the task's prompt opens


def test_a_stop_phrase_ends_it_and_steps_are_rewarded(engine: FakeEngine) -> None:
    rows = explore(engine, user=f"{HERE}:examiner").rows
    assert [row.step_reward for row in rows] == [0.5, 0.5] and rows[-1].run_reward == 1.0
    assert [m["content"] for m in rows[-1].run_output if m["role"] == "user"] == ["question 0", "go on"]


def test_an_auxiliary_model_plays_the_user(engine: FakeEngine) -> None:
    spec = AuxiliarySpec("guest", "fake-model", engine.base_url, defaults={"max_tokens": 32})
    batch = explore(engine, {"guest": AuxiliaryModel(spec)}, user="guest", max_rounds=2, opening="user")
    assert len(batch.rows) == 2  # what the guest says is not recorded
    said = batch.rows[-1].run_output
    first, answered, second = (engine.chat_requests[n]["messages"] for n in (0, 1, 2))
    assert first[0]["role"] == "system" and "question 0" in first[0]["content"] and "[DONE]" in first[0]["content"]
    assert answered[-1]["content"] == said[0]["content"]
    assert [m["role"] for m in second] == ["system", "assistant", "user"]
    assert [m["content"] for m in second[1:]] == [said[0]["content"], said[1]["content"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"user": "nobody.at.all:function"}, "cannot import"),
        ({"user": f"{HERE}:wrong"}, r"Missing essential parameters: \['messages'\]"),
        ({"user": f"{HERE}:customer", "max_rounds": 0}, "max_rounds is 0"),
        ({"user": f"{HERE}:customer", "opening": "policy"}, "expected 'task' or 'user'"),
        ({"user": "guest", "user_prompt": '{prompt} as {"text": ...}'}, "user_prompt .*write every other brace twice"),
        ({}, "workflow_args .* do not fit"),
    ],
)
def test_the_error_of_bad_arguments_names_the_cause(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_workflow("dialogue", arguments)


def test_the_error_names_a_missing_user_model(engine: FakeEngine) -> None:
    with pytest.raises(UserCodeError, match=r"user 'guest' is not an auxiliary model \(none\)"):
        explore(engine, user="guest")
