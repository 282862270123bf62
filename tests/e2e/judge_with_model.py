"""A judge that asks another model before it rewards: the share of digits in the answer, if the critic answers."""

from typing import Any


async def heard_by_critic(task: dict, response: str, auxiliary_models: dict[str, Any]) -> float:
    critic = auxiliary_models["critic"]
    messages = [{"role": "user", "content": f"{task['question']} {response}"}]
    answer = await critic.get_openai_async_client().chat.completions.create(
        model=critic.model_name, messages=messages, max_tokens=1
    )
    assert answer.choices[0].finish_reason in ("stop", "length")
    return sum(character.isdigit() for character in response or "") / max(len(response or ""), 1)
