"""The agent as a workflow: its chat model is pointed at the address and the key that this run is recorded under."""

from typing import Any

from agent import answer
from langchain_openai import ChatOpenAI

from rft_platform.rollout.workflow import WorkflowOutput


async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Answer the task's question."""
    chat = ChatOpenAI(model=model.model_name, base_url=model.base_url, api_key=model.api_key)
    return WorkflowOutput(response=await answer(chat, task["question"]))
