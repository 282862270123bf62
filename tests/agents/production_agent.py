"""The agent of an example in production: ``production_agent.py STACK FOLDER QUESTION`` prints its answer.

It finds the gateway in ``OPENAI_BASE_URL``, and its key in ``OPENAI_API_KEY``. Nothing in it knows of the platform.
"""

import asyncio
import inspect
import os
import sys
from typing import Any


def model_of(stack: str) -> Any:
    """The framework's model with nothing but a name."""
    if stack == "langgraph":
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(model="policy")
    if stack == "openai_agents":
        from openai import AsyncOpenAI

        from agents import OpenAIChatCompletionsModel, set_tracing_disabled

        set_tracing_disabled(True)
        return OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI())
    if stack == "smolagents":
        from smolagents import OpenAIModel

        return OpenAIModel("policy")
    if stack == "pydantic_ai":
        from pydantic_ai.models.openai import OpenAIChatModel

        return OpenAIChatModel("policy")
    from agentscope.model import OpenAIChatModel as AgentScopeModel

    if stack == "agentscope2":
        from agentscope.credential import OpenAICredential

        address = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
        return AgentScopeModel(OpenAICredential(**address), "policy")  # streams
    return AgentScopeModel("policy")  # streams


def main() -> None:
    """Answer the question and print the answer."""
    stack, folder, question = sys.argv[1:]
    sys.path.insert(0, folder)
    from agent import answer

    if stack.startswith("openai") and stack != "openai_agents":
        from openai import AsyncOpenAI

        said = answer(AsyncOpenAI(), "policy", question)
    else:
        said = answer(model_of(stack), question)
    if inspect.isawaitable(said):
        said = asyncio.run(_value(said))
    print(said if isinstance(said, str) else said.get_text_content())


async def _value(awaitable: Any) -> Any:
    return await awaitable


if __name__ == "__main__":
    main()
