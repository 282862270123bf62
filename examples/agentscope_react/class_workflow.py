"""The class style: an agent that is given an OpenAI client, and a workflow that rewards what it recorded.

``workflow: class_workflow.py:AgentScopeReActWorkflow`` with ``judge: null`` in place of those of gsm8k.yaml.
"""

import re

import openai
from agent import make_toolkit
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.model import OpenAIChatModel

from rft_platform.rollout.class_style import Experience, ModelWrapper, Task, Workflow


class AgentScopeReActAgent:
    """AgentScope's ReAct agent, with a client that the platform provides."""

    def __init__(self, openai_client: openai.AsyncOpenAI, model_name: str) -> None:
        self.agent_model = OpenAIChatModel(api_key="EMPTY", model_name=model_name, stream=False)
        self.agent_model.client = openai_client
        self.agent = ReActAgent(
            name="react_agent",
            sys_prompt="Solve the problem and end with #### and the number.",
            model=self.agent_model,
            formatter=OpenAIChatFormatter(),
            toolkit=make_toolkit(),
            max_iters=4,
        )
        self.agent.set_console_output_enabled(False)

    async def reply(self, query: str) -> Msg:
        """The agent's answer; nothing of its logic is changed."""
        return await self.agent.reply(Msg("user", query, role="user"))


class AgentScopeReActWorkflow(Workflow):
    """Ask the agent, reward its answer, and give every model call of the run that reward."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.agent = AgentScopeReActAgent(model.get_openai_async_client(), model.model_name)
        self.query = task.raw_task.get(task.format_args.prompt_key)

    async def run_async(self) -> list[Experience]:
        """One run."""
        response = await self.agent.reply(self.query)
        reward = await self.calculate_reward(response)
        return self.construct_experiences(reward)

    async def calculate_reward(self, response: Msg) -> float:
        """1 where the last number of the answer is that after #### in the reference."""
        numbers = re.findall(r"-?\d+", response.get_text_content() or "")
        return float(bool(numbers) and numbers[-1] == str(self.task.truth).rpartition("####")[2].strip())

    def construct_experiences(self, reward: float) -> list[Experience]:
        """What was recorded, with its reward."""
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = reward
        return experiences
