"""The agent as a workflow: its provider gets a client whose calls are recorded."""

from typing import Any

from agent import answer
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from rft_platform.rollout.workflow import WorkflowOutput


async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Answer the task's question."""
    provider = OpenAIProvider(openai_client=model.get_openai_async_client())
    return WorkflowOutput(response=await answer(OpenAIChatModel(model.model_name, provider=provider), task["question"]))
