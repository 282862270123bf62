"""AgentScope 1.0.x: a chat model that wraps a model handle, and the built-in workflow ``agentscope_react``.

Importing this module imports AgentScope and ``openai``. ``workflow_args`` of the workflow (all optional): ``toolkit``,
a reference to a ``Toolkit`` or to a function that returns one; ``max_iters``, ``agent_name``, ``generate_kwargs`` (sent
with each model call), ``enable_meta_tool``.
"""

import inspect
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.user_code import load_object
from rft_platform.rollout.class_style import ModelWrapper, Task, Workflow
from rft_platform.rollout.workflow import WorkflowOutput
from rft_platform.rollout.workflows.chat_models import DelegatesToHandle, agentscope_version, unused_connections

try:
    import openai
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.message import Msg
    from agentscope.model import OpenAIChatModel
    from agentscope.tool import Toolkit
except ImportError as error:
    raise UserError(
        f"ReActAgent needs AgentScope 1.x; installed: {agentscope_version() or 'none'} ({error}). Install "
        "'agentscope>=1.0.21,<2', or run AgentScope 2's Agent in your own workflow function (docs/tune.md)"
    ) from error

SYSTEM_PROMPT = "You are a helpful assistant. Solve the task step by step and use the tools you have."
_ARGUMENTS = ("toolkit", "max_iters", "agent_name", "generate_kwargs", "enable_meta_tool")


class RecordedChatModel(DelegatesToHandle, OpenAIChatModel):
    """An ``OpenAIChatModel`` that uses the handle's client and delegates all other attributes to the handle."""

    def __init__(self, handle: Any) -> None:
        """``handle`` has ``model_name`` and ``get_openai_async_client()``."""
        super().__init__(
            model_name=handle.model_name,
            api_key="EMPTY",
            stream=False,
            client_kwargs={"http_client": unused_connections()},
        )
        self._handle = handle
        self.client = handle.get_openai_async_client()


class AgentScopeReActAgent:
    """A ``ReActAgent`` whose chat model uses ``openai_client``."""

    def __init__(
        self,
        openai_client: openai.AsyncOpenAI,
        model_name: str,
        *,
        system_prompt: str = SYSTEM_PROMPT,
        toolkit: Toolkit | None = None,
        max_iters: int = 10,
        agent_name: str = "react_agent",
        generate_kwargs: dict[str, Any] | None = None,
        enable_meta_tool: bool = False,
    ) -> None:
        """Takes the arguments of ``ReActAgent``; ``generate_kwargs`` are sent with every request."""
        self.agent_model = OpenAIChatModel(
            model_name=model_name, api_key="EMPTY", stream=False, generate_kwargs=generate_kwargs
        )
        self.agent_model.client = openai_client
        self.agent = ReActAgent(
            name=agent_name,
            sys_prompt=system_prompt,
            model=self.agent_model,
            formatter=OpenAIChatFormatter(),
            toolkit=toolkit,
            max_iters=max_iters,
            enable_meta_tool=enable_meta_tool,
        )
        self.agent.set_console_output_enabled(False)

    async def reply(self, query: str) -> Msg:
        """Return the agent's answer to a question of the user."""
        return await self.agent.reply(Msg("user", query, role="user"))


class AgentScopeReActWorkflow(Workflow):
    """Runs one agent per run. The judge rewards the agent's answer, unless ``calculate_reward`` of a subclass does."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[Any] | None = None) -> None:
        """Raises UserError for unknown workflow_args and for a task without a prompt."""
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        arguments = dict(task.workflow_args)
        unknown = sorted(set(arguments) - set(_ARGUMENTS))
        if unknown:
            raise UserError(f"workflow agentscope_react: workflow_args {unknown}; expected {', '.join(_ARGUMENTS)}")
        if task.task_desc is None:
            key = task.format_args.prompt_key
            raise UserError(f"workflow agentscope_react: the task has no {key!r}: name its column in format.prompt_key")
        self.query = str(task.task_desc)
        self.agent = AgentScopeReActAgent(
            model.get_openai_async_client(),
            model.model_name,
            system_prompt=task.format_args.system_prompt or SYSTEM_PROMPT,
            toolkit=load_toolkit(arguments.pop("toolkit", None)),
            **arguments,
        )

    async def run_async(self) -> WorkflowOutput:  # type: ignore[override]  # the runner accepts both types
        """Ask the agent; return its answer and reward."""
        response = await self.agent.reply(self.query)
        return WorkflowOutput(reward=await self.calculate_reward(response), response=response)

    async def calculate_reward(self, response: Msg) -> float | None:
        """Return the run's reward; None: the judge rewards the run."""
        return None


def load_toolkit(reference: str | None) -> Toolkit | None:
    """Load the toolkit that a reference names; if it names a function, call it. Raises UserError for other objects."""
    if reference is None:
        return None
    found = load_object(reference, "toolkit")
    toolkit = found() if inspect.isfunction(found) else found
    if not isinstance(toolkit, Toolkit):
        raise UserError(
            f"toolkit {reference!r}: is {type(toolkit).__name__}, expected a Toolkit or a function that makes one"
        )
    return toolkit
