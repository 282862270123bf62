"""Agents of every framework, unchanged, against the real engine: what is recorded is what the engine saw and sampled.

The model knows its answers by heart, so that each agent makes the same tool call and gets the tool's real result.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft_platform.common.errors import UserError
from rft_platform.experience.record import RolloutRow
from rft_platform.experience.responses import ResponseDecoder
from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.judging.judged_run import response_text
from rft_platform.openai_api.messages import normalised
from rft_platform.rollout.class_style import FormatArgs
from rft_platform.rollout.workers.import_check import check_importable
from rft_platform.rollout.workflow import WorkerWorkflow

from .conftest import EXAMPLES, STACKS, required, run_workflow
from .teacher import ANSWER, EXPRESSION, Teacher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first session teaches the model, for a minute

Runs = Callable[[str], list[RolloutRow]]
FORCED = "<tool_call>\n"  # what the engine puts into the prompt of an answer that must be a call
AGENTS = [stack for stack in STACKS if stack != "agentscope_structured"]


def first_run(rows: list[RolloutRow]) -> list[RolloutRow]:
    """The rows of one run, in order."""
    return [row for row in rows if row.run_id == rows[0].run_id]


def call_of(row: RolloutRow) -> dict[str, Any]:
    """The one tool call of an answer."""
    (call,) = row.response["tool_calls"]
    function: dict[str, Any] = call["function"]
    return function


@pytest.mark.parametrize("stack", AGENTS)
def test_the_agent_calls_its_tool_and_answers(runs: Runs, stack: str) -> None:
    rows = runs(stack)
    calling, answering = first_run(rows)
    assert call_of(calling)["name"] == "calculator"
    assert json.loads(call_of(calling)["arguments"]) == {"expression": EXPRESSION}
    assert ANSWER in json.dumps(answering.messages[-1]), "the tool's result is the last thing the model reads"
    assert response_text(ResponseDecoder().decode(answering.run_output)) == ANSWER
    assert calling.finish_reason in ("stop", "tool_calls") and answering.finish_reason in ("stop", "tool_calls")
    assert len({row.run_id for row in rows}) == 2, "both runs succeeded"


@pytest.mark.parametrize("stack", STACKS)
def test_recorded_ids_are_the_engines_own(runs: Runs, agents_engine: PolicyEngine, stack: str, pupil: Path) -> None:
    from transformers import AutoTokenizer

    rows, tokenizer = runs(stack), AutoTokenizer.from_pretrained(pupil)
    scores = agents_engine.score([[*row.prompt_ids, *row.response_ids] for row in rows])
    again = agents_engine.generate([row.prompt_ids for row in rows], SamplingParams(max_tokens=64, temperature=0.0))
    for row, score, own in zip(rows, scores, again, strict=True):
        np.testing.assert_allclose(row.rollout_logprobs, score[len(row.prompt_ids) :], atol=1e-4)
        assert own.completions[0].token_ids == row.response_ids
        text = tokenizer.apply_chat_template(
            [normalised(message) for message in row.messages],
            tools=row.tools or None, add_generation_prompt=True, tokenize=False,
        )  # fmt: skip
        rendered = tokenizer.encode(text, add_special_tokens=False)
        forced = tokenizer.encode(FORCED, add_special_tokens=False)
        assert row.prompt_ids in (rendered, [*rendered, *forced])
        assert agents_engine.render([row.messages], row.tools or None) == [rendered]


@pytest.mark.parametrize("stack", ["agentscope", "agentscope2", "langgraph", "openai_agents", "openai2", "openai3"])
def test_the_second_prompt_continues_from_the_first_answer(runs: Runs, stack: str) -> None:
    calling, answering = first_run(runs(stack))
    begun = [*calling.prompt_ids, *calling.response_ids]
    assert answering.prompt_ids[: len(begun)] == begun


def test_both_lines_of_openais_client_record_the_same(runs: Runs) -> None:
    def told(stack: str) -> list[tuple[list[int], list[int]]]:
        return [(row.prompt_ids, row.response_ids) for row in first_run(runs(stack))]

    assert told("openai2") == told("openai3")


def test_smolagents_rewrites_its_history(runs: Runs) -> None:
    calling, answering = first_run(runs("smolagents"))
    roles = [message["role"] for message in answering.messages]
    assert roles == ["system", "user", "assistant", "user"], "the call comes back as text, the result as the user's"
    assert not any(message.get("tool_calls") for message in answering.messages)
    begun = [*calling.prompt_ids, *calling.response_ids]
    shared = next(i for i, (a, b) in enumerate(zip(begun, answering.prompt_ids, strict=False)) if a != b)
    assert shared < len(calling.prompt_ids), "not even the first prompt is shared whole: it ends in the forced call"
    assert call_of(answering)["name"] == "final_answer"


def test_pydantic_ai_serialises_arguments_again(runs: Runs) -> None:
    calling, answering = first_run(runs("pydantic_ai"))
    (sent_back,) = (call for message in answering.messages for call in message.get("tool_calls") or [])
    assert sent_back["function"]["arguments"] != call_of(calling)["arguments"]
    assert json.loads(sent_back["function"]["arguments"]) == json.loads(call_of(calling)["arguments"])


def test_agentscope_sends_lists_of_parts_and_names(runs: Runs) -> None:
    _, answering = first_run(runs("agentscope"))
    system, user, call, result = answering.messages
    assert system["content"] == [{"type": "text", "text": "Use the calculator."}]
    assert all("name" in message for message in (system, user, call, result))
    assert call["content"] is None and call["tool_calls"]
    assert answering.run_output["$class"].endswith(":Msg"), "the judge gets AgentScope's message"


def test_agentscope_structured_answers_change_the_tool_choice(runs: Runs, agents_engine: PolicyEngine) -> None:
    calling, structured, told = first_run(runs("agentscope_structured"))
    assert call_of(calling)["name"] == "calculator" and call_of(structured)["name"] == "generate_response"
    forced_calling, forced_structured, free = agents_engine.decode(
        [row.prompt_ids[-2:] for row in (calling, structured, told)]
    )
    assert forced_calling == forced_structured == FORCED and free != FORCED
    assert told.tools == [] and told.response["content"] == ANSWER, "with tool_choice none no tool is shown"
    assert told.metrics["value"] == float(ANSWER)


def test_agentscopes_ready_workflow_is_the_same_agent(runs: Runs, agents_engine: PolicyEngine) -> None:
    workflow = WorkerWorkflow(
        "agentscope_react",
        {"toolkit": f"{EXAMPLES}/agentscope_react/agent.py:make_toolkit", "max_iters": 4},
        FormatArgs(system_prompt="Use the calculator."),
        python=str(required("agentscope")),
    )
    rows, own = run_workflow(agents_engine, workflow), first_run(runs("agentscope"))
    assert [(row.prompt_ids, row.response_ids) for row in rows] == [(row.prompt_ids, row.response_ids) for row in own]
    assert response_text(ResponseDecoder().decode(rows[-1].run_output)) == ANSWER and rows[-1].run_reward is None


def test_agentscopes_agent_in_the_class_style_rewards_itself() -> None:
    file, teacher = EXAMPLES / "agentscope_react" / "class_workflow.py", Teacher()
    workflow = WorkerWorkflow(f"{file}:AgentScopeReActWorkflow", python=str(required("agentscope")))
    teacher.serve()
    try:
        rows = run_workflow(teacher, workflow)
    finally:
        teacher.shutdown()
    assert [row.run_reward for row in rows] == [None, 1.0] and len(rows) == 2


def test_agentscope2_with_its_own_chat_model_at_the_address_of_the_run_is_recorded() -> None:
    teacher = Teacher()
    workflow = WorkerWorkflow(
        f"{EXAMPLES / 'agentscope2' / 'workflow.py'}:workflow_by_address", python=str(required("agentscope2"))
    )
    teacher.serve()
    try:
        calling, answering = run_workflow(teacher, workflow)
    finally:
        teacher.shutdown()
    assert all(request["stream"] for request in teacher.chat_requests), "AgentScope streams by default"
    assert call_of(calling)["name"] == "calculator" and answering.response["content"] == ANSWER


@pytest.mark.parametrize("name", ["agentscope_react", f"{EXAMPLES / 'agentscope_react' / 'workflow.py'}:workflow"])
def test_code_for_agentscope1_is_refused_with_the_installed_version(name: str) -> None:
    python = required("agentscope2")
    with pytest.raises(UserError, match=r"installed: 2\.\d|agentscope 2\.\S+ is installed"):
        check_importable(WorkerWorkflow(name, python=str(python)))
