"""The agent as a workflow: it gets a client whose calls are recorded."""

from typing import Any

from agent import answer

from rft_platform.rollout.workflow import WorkflowOutput


async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Answer the task's question."""
    return WorkflowOutput(response=await answer(model.get_openai_async_client(), model.model_name, task["question"]))
