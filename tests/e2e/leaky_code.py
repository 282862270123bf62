"""A workflow and a judge whose errors carry secrets, as those of HTTP and database clients do."""

import os
from typing import Any

from rft_platform.rollout.workflow import WorkflowOutput

LITERAL = "sk-proj-" + "EPAHSfedcba9876543210"[::-1]  # the source, of which a copy is kept, does not show it


def _message(who: str) -> str:
    key = os.environ["HELPER_KEY"]
    return (
        f"{who} cannot log in: https://api.example/v1?api_key=QUERYsecret1 postgresql://u:URLsecret22@db/x "
        f"Authorization: Bearer BEARERsecret333 with {key} and {LITERAL}"
    )


async def solve(task: dict[str, Any], model: Any, auxiliary_models: dict[str, Any]) -> WorkflowOutput:
    """Fail on some tasks, ask the helper (which refuses the key and repeats it) on others."""
    question = task["question"]
    if question.startswith("0"):
        try:
            raise ValueError(_message("cause"))
        except ValueError as error:
            raise RuntimeError(_message("agent")) from error
    if question.startswith("1"):
        helper = auxiliary_models["helper"]
        client = helper.get_openai_async_client()
        await client.chat.completions.create(model=helper.model_name, messages=[{"role": "user", "content": question}])
    client = model.get_openai_async_client()
    messages = [{"role": "user", "content": question}]
    answer = await client.chat.completions.create(model=model.model_name, messages=messages)
    return WorkflowOutput(response=answer.choices[0].message.content)


def judge(task: dict[str, Any], response: str) -> float:
    """Fail while LEAKY_JUDGE is set."""
    if os.environ.get("LEAKY_JUDGE"):
        raise RuntimeError(_message("judge"))
    return float(len(response) % 2)
