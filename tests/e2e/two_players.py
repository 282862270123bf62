"""A game of two policies against each other: whose answer has the larger share of digits. What one wins, one loses."""

from typing import Any

from rft_platform.rollout.workflow import WorkflowOutput


async def play(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """The first policy speaks, the second answers it twice, over the first one's client and by its own handle."""
    rival = model.policy("rival")
    question: list[dict[str, Any]] = [{"role": "user", "content": task["question"]}]
    said = (await model.chat(question)).get("content") or ""
    client = model.get_openai_async_client()
    answer = await client.chat.completions.create(model="rival", messages=question)
    again = await rival.chat([{"role": "user", "content": f"{task['question']} {said}"}])
    answers = (answer.choices[0].message.content or "") + (again.get("content") or "")
    won = digits(said) - digits(answers)
    return WorkflowOutput(reward=won, rewards={"rival": -won})


def digits(text: str) -> float:
    """Share of the characters that are digits."""
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)
