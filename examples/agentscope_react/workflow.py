"""The agent as a workflow: the model it gets is AgentScope's own chat model, with a client whose calls are recorded."""

from typing import Any

from agent import answer

from rft_platform.rollout.workflow import WorkflowOutput


async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Answer the task's question; the response is AgentScope's message."""
    return WorkflowOutput(response=await answer(model, task["question"]))
