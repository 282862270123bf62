"""The agent as a workflow: the model it gets is AgentScope's own chat model, with a client whose calls are recorded."""

from typing import Any

from agent import answer
from agentscope.credential import OpenAICredential
from agentscope.model import OpenAIChatModel

from rft_platform.rollout.workflow import WorkflowOutput


async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Answer the task's question; the response is AgentScope's message."""
    return WorkflowOutput(response=await answer(model, task["question"]))


async def workflow_by_address(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """The same with a chat model of your own, which streams: calls at the run's address with its key are recorded."""
    chat = OpenAIChatModel(OpenAICredential(api_key=model.api_key, base_url=model.base_url), model.model_name)
    try:
        return WorkflowOutput(response=await answer(chat, task["question"]))
    finally:
        await chat.client.close()
