"""The agent as a workflow: its model gets a client whose calls are recorded."""

from typing import Any

from agent import answer
from agents import OpenAIChatCompletionsModel, set_tracing_disabled

from rft_platform.rollout.workflow import WorkflowOutput

set_tracing_disabled(True)  # traces go to OpenAI otherwise


async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Answer the task's question."""
    chat = OpenAIChatCompletionsModel(model=model.model_name, openai_client=model.get_openai_async_client())
    return WorkflowOutput(response=await answer(chat, task["question"]))
