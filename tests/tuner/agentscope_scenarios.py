"""What real AgentScope agents do with the model that a workflow gets; prints one JSON document.

Run by ``test_tuner_agentscope.py`` with an interpreter that has AgentScope 1.x; ``ENGINE`` and ``TOKEN`` in the
environment name a running engine. The scripted engine stands in where a certain answer is wanted of the model.
"""

import json
import os
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.evaluate import MetricBase, MetricResult, MetricType
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import OpenAIChatModel
from agentscope.tool import Toolkit, ToolResponse
from pydantic import BaseModel

from rft_platform.config.rollout_limits import RolloutLimits
from rft_platform.experience.record import RolloutRow
from rft_platform.experience.responses import ResponseDecoder
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import SamplingParams
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import judge_runs
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.tasks.task import Task
from rft_platform.tuner import WorkflowOutput
from tests.rollout.fake_engine import FakeEngine

TASKS = [Task(f"t{i}", "set", f"{i}+1=?", str(i + 1), {"question": f"{i}+1=?", "answer": str(i + 1)}) for i in range(3)]


RolledOut = tuple[list[RolloutRow], dict[str, Any]]


class Answer(BaseModel):
    """The structured output."""

    number: int


def calculator(expression: str) -> ToolResponse:
    """Evaluate an expression.

    Args:
        expression (str): such as 1+1
    """
    return ToolResponse(content=[TextBlock(type="text", text=f"{expression} is 9")])


class Contains(MetricBase):
    """A metric as AgentScope has them."""

    def __init__(self, answer: str) -> None:
        super().__init__("contains", MetricType.NUMERICAL)
        self.answer = answer

    async def __call__(self, solution: Any) -> MetricResult:
        return MetricResult(self.name, float(self.answer in solution.output.get_text_content()))


def agent(model: OpenAIChatModel, **options: Any) -> ReActAgent:
    made = ReActAgent(name="friend", sys_prompt="解题", model=model, formatter=OpenAIChatFormatter(), **options)
    made.set_console_output_enabled(False)
    return made


async def reply(task: dict[str, Any], model: OpenAIChatModel, auxiliary_models: dict[str, Any]) -> WorkflowOutput:
    assert isinstance(model, OpenAIChatModel) and auxiliary_models == {}
    response = await agent(model).reply(Msg("user", task["question"], role="user"))
    return WorkflowOutput(response=response, metrics={"letters": len(response.get_text_content() or "")})


async def streamed(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
    model.stream = True
    return WorkflowOutput(response=await agent(model).reply(Msg("user", task["question"], role="user")))


async def sampled(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
    answer = await model([{"role": "user", "content": task["question"]}], temperature=0.5, max_tokens=3)
    same = model.get_openai_async_client() is model.client
    return WorkflowOutput(response=answer.content, metrics={"same_client": float(same)})


async def with_tools(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
    toolkit = Toolkit()
    toolkit.register_tool_function(calculator)
    response = await agent(model, toolkit=toolkit, max_iters=3).reply(Msg("user", task["question"], role="user"))
    return WorkflowOutput(response=response)


async def structured(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
    friend = agent(model, max_iters=3)
    response = await friend.reply(Msg("user", task["question"], role="user"), structured_model=Answer)
    return WorkflowOutput(response=response, reward=float(response.metadata["number"]))


async def parsed(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
    answer = await model([{"role": "user", "content": task["question"]}], structured_model=Answer)
    return WorkflowOutput(response=answer.metadata, reward=float(answer.metadata["number"]))


class ScriptedEngine(FakeEngine):
    """Calls a tool where it may, fills in the structured output where it must, else answers in words."""

    def _chat_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super()._chat_answer(body)
        message = answer["choices"][0]["message"]
        names = [tool["function"]["name"] for tool in body.get("tools") or []]
        choice, last = body.get("tool_choice"), body["messages"][-1]["role"]
        if body.get("response_format"):
            message["content"] = "no JSON at all"
        elif choice == "required" or isinstance(choice, dict):
            message.update(content=None, tool_calls=[_call(names[-1], {"number": 7})])
        elif "calculator" in names and choice != "none" and last == "user":
            message.update(content=None, tool_calls=[_call("calculator", {"expression": "1+1"})])
        return answer


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def rolled_out(engine: Any, workflow: Any, repeat_times: int = 2, max_tokens: int = 6) -> RolledOut:
    sampling = SamplingParams(max_tokens=max_tokens)
    batch = run_rollouts(
        engine,
        TASKS,
        workflow,
        round=1,
        batch=0,
        repeat_times=repeat_times,
        sampling=sampling,
        limits=RolloutLimits(max_retries=0),
    )
    facts = {
        "failed": batch.report.failed,
        "errors": dict(batch.report.errors),
        "steps": [row.step for row in batch.rows],
        "messages": batch.rows[0].messages,
        "last_messages": batch.rows[-1].messages,
        "rewards": [row.run_reward for row in batch.rows],
        "metrics": [row.metrics for row in batch.rows],
        "temperature": batch.rows[0].temperature,
        "answer_tokens": max(len(row.response_ids) for row in batch.rows),
    }
    return batch.rows, facts


def exact(engine: EngineClient, rows: list[RolloutRow]) -> dict[str, bool]:
    """Whether the rows are what the template rendered and what the engine sampled."""
    scores = engine.score([[*row.prompt_ids, *row.response_ids] for row in rows])
    near = all(
        abs(own - again) < 1e-4
        for row, score in zip(rows, scores, strict=True)
        for own, again in zip(row.rollout_logprobs, score[len(row.prompt_ids) :], strict=True)
    )
    return {"prompts": all(engine.render([row.messages])[0] == row.prompt_ids for row in rows), "logprobs": near}


def main() -> None:
    engine = EngineClient(os.environ["ENGINE"], token=os.environ["TOKEN"])
    scripted = ScriptedEngine()
    scripted.serve()
    results: dict[str, Any] = {}
    for name, workflow in {"reply": reply, "streamed": streamed, "sampled": sampled}.items():
        rows, results[name] = rolled_out(engine, workflow)
        if name != "sampled":  # scores are those of temperature 1
            results[name]["exact"] = exact(engine, rows)
        if name == "reply":
            response = ResponseDecoder().decode(rows[0].run_output)
            results[name]["response"] = [
                type(response).__name__,
                response.get_text_content() == rows[0].response["content"],
            ]
            tasks = {task.task_id: task for task in TASKS}
            runs = judge_runs(rows, tasks, build_judge(f"{__name__}:Contains"))
            results["metric"] = [
                [run.reward, float(tasks[run.task_id].answer in row.response["content"])]
                for run, row in zip(runs, rows, strict=True)
            ]
    for name, workflow in {"with_tools": with_tools, "structured": structured, "parsed": parsed}.items():
        scripted.chat_requests.clear()
        _, results[name] = rolled_out(scripted, workflow, repeat_times=1, max_tokens=32)
        asked = scripted.chat_requests[: len(scripted.chat_requests) // len(TASKS)]
        results[name]["tool_choices"] = sorted(str(body.get("tool_choice")) for body in scripted.chat_requests)
        results[name]["asked"] = len(asked)
    scripted.shutdown()
    print("RESULTS " + json.dumps(results, ensure_ascii=False))


if __name__ == "__main__":
    main()
