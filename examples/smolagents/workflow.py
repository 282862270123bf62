"""The agent as a workflow: its model is pointed at the address and the key that this run is recorded under."""

from typing import Any

from agent import answer
from smolagents import OpenAIModel

from rft_platform.rollout.workflow import WorkflowOutput


def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Answer the task's question; smolagents is not async, so the platform runs this in a thread."""
    chat = OpenAIModel(model.model_name, api_base=model.base_url, api_key=model.api_key)
    return WorkflowOutput(response=answer(chat, task["question"]))
