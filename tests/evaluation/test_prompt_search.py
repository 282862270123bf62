"""The search for a prompt with GEPA: what is kept, what the reflection model reads, and when the search ends."""

import pytest

from rft_platform.evaluation.prompt_search import PromptRun, search_prompts

TASKS = list(range(6))


def runs(prompt: str, tasks: list[int]) -> list[PromptRun]:
    """A prompt solves as many tasks as it has letters."""
    return [PromptRun(float(task < len(prompt)), {"task": task}) for task in tasks]


def test_prompts_that_are_better_than_all_before_are_kept_in_order() -> None:
    made, asked = [], list[str]()

    def counted(prompt: str, tasks: list[int]) -> list[PromptRun]:
        made.extend(tasks)
        return runs(prompt, tasks)

    def reflect(question: str) -> str:
        asked.append(question)
        assert "task" in question and "reward" in question
        longest = max(len(line) for line in question.splitlines() if line and set(line) == {"a"})
        return f"Longer is better.\n```\n{'a' * (longest + 2)}\n```"

    found = search_prompts(counted, TASKS, "aa", reflect, runs=200, minibatch=6)
    assert [prompt.text for prompt in found.prompts] == ["aa", "aaaa", "aaaaaa"]
    assert [prompt.reward for prompt in found.prompts] == pytest.approx([2 / 6, 4 / 6, 1.0])
    assert [prompt.runs for prompt in found.prompts] == [6, 24, 42]
    assert found.best.text == "aaaaaa" and found.tried == 3 and len(asked) >= 2
    assert 200 <= found.runs == len(made)


def test_worse_prompts_are_not_measured_on_all_tasks() -> None:
    found = search_prompts(runs, TASKS, "aa", lambda question: "```\na\n```", runs=60, minibatch=3)
    assert [prompt.text for prompt in found.prompts] == ["aa"]
    assert found.tried == 1 and 60 <= found.runs < 60 + 6


def test_rewards_beyond_1_are_improved_too() -> None:
    def letters(prompt: str, tasks: list[int]) -> list[PromptRun]:
        return [PromptRun(float(len(prompt))) for _ in tasks]

    found = search_prompts(letters, TASKS, "aa", lambda question: "```\naaaa\n```", runs=40, minibatch=3)
    assert [(prompt.text, prompt.reward) for prompt in found.prompts] == [("aa", 2.0), ("aaaa", 4.0)]


@pytest.mark.parametrize(("budget", "proposals"), [(6, 0), (7, 1)])
def test_a_prompt_is_proposed_if_runs_are_left_after_the_starting_prompt(budget: int, proposals: int) -> None:
    asked = list[str]()
    search_prompts(
        runs, TASKS, "aa", lambda question: asked.append(question) or "```\na\n```", runs=budget, minibatch=3
    )
    assert len(asked) == proposals


def test_the_search_depends_on_its_seed_alone() -> None:
    def answers() -> list[str]:
        read: list[str] = []

        def reflect(question: str) -> str:
            read.append(question)
            return "```\n" + "a" * (2 + len(read) % 3) + "\n```"

        search_prompts(runs, TASKS, "aa", reflect, runs=80, minibatch=2, seed=3)
        return read

    assert answers() == answers() != []


def test_an_error_of_the_reflection_model_or_of_a_run_ends_the_search() -> None:
    asked, made = list[str](), list[int]()

    def reflect(question: str) -> str:
        asked.append(question)
        raise ConnectionError("no answer")

    def breaks(prompt: str, tasks: list[int]) -> list[PromptRun]:
        made.extend(tasks)
        if len(made) > len(TASKS):
            raise RuntimeError("the engine is gone")
        return runs(prompt, tasks)

    with pytest.raises(ConnectionError, match="no answer"):
        search_prompts(runs, TASKS, "aa", reflect, runs=6000, minibatch=2)
    assert len(asked) <= 2
    with pytest.raises(RuntimeError, match="the engine is gone"):
        search_prompts(breaks, TASKS, "aa", reflect, runs=6000, minibatch=2)
    assert len(made) <= len(TASKS) + 4
