"""``rft debug``: one task end to end, in a real engine, without a project."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import Result

AGENT = """
from rft_platform.rollout.workflow import WorkflowOutput


async def two_turns(task, model):
    client, messages = model.get_openai_async_client(), [{"role": "user", "content": task["question"]}]
    for _ in range(2):
        answer = await client.chat.completions.create(model=model.model_name, messages=messages, max_tokens=8)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content},
                     {"role": "user", "content": "Are you sure?"}]
    return WorkflowOutput(response="42", metrics={"turns": 2.0})


async def broken(task, model):
    return task["no_such_column"]
"""

GAME = """
from rft_platform.rollout.workflow import WorkflowOutput


async def play(task, model):
    rival, messages = model.policy("rival"), [{"role": "user", "content": task["question"]}]
    mine = await model.chat(messages)
    await rival.chat([*messages, mine, {"role": "user", "content": "Better that."}])
    return WorkflowOutput(reward=0.25, rewards={"rival": -0.25})
"""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    file = tmp_path / "agent.py"
    file.write_text(AGENT)
    return file


def run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rft_platform", "debug", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_a_workflow_with_its_transcript_rows_and_reward(agent: Path, tmp_path: Path) -> None:
    options = ("workflow", f"{agent}:two_turns", "--judge", "numeric")
    shown = run(*options, "--tokens")
    assert shown.returncode == 0, shown.stderr
    for part in ("What is 17+25?", "Are you sure?", "assistant (step 1)", 'the workflow returned "42"', "turns 2"):
        assert part in shown.stdout
    assert "reward 1 by numeric" in shown.stdout
    found = json.loads(run(*options, "--json").stdout)
    first, second = found["calls"]
    assert found["reward"] == 1.0 and found["judge"] == "numeric"
    assert len(first["response_ids"]) == len(first["rollout_logprobs"]) <= 8
    assert second["messages"][:1] == first["messages"] and second["prompt_tokens"] > first["prompt_tokens"]


@pytest.mark.slow
def test_the_run_is_shown_if_its_judge_fails(agent: Path, tmp_path: Path) -> None:
    (tmp_path / "strict.py").write_text("def judge(task, response):\n    return task['no_such_column']\n")
    options = ("workflow", f"{agent}:two_turns", "--judge", f"{tmp_path / 'strict.py'}:judge")
    shown = run(*options)
    assert shown.returncode == 1
    for part in ("Are you sure?", "assistant (step 1)", "no_such_column"):
        assert part in shown.stdout, part
    failed = run(*options, "--json")
    found = json.loads(failed.stdout)
    assert (failed.returncode, len(found["calls"]), found["reward"]) == (1, 2, None)
    assert "no_such_column" in found["judge_error"]


@pytest.mark.slow
def test_a_workflow_calls_the_policies_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "tasks.jsonl").write_text('{"question": "Say a number.", "answer": "7"}\n')
    taskset = {"path": "tasks.jsonl", "workflow": "game.py:play", "judge": None}
    policies = [{"name": "rival", "model_path": "no/such-model"}]
    file = tmp_path / "rft.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "project": "games", "name": "one", "policies": policies,
                "model": {"max_response_tokens": 8},
                "buffer": {"batch_size": 1, "total_steps": 1, "explorer_input": {"taskset": taskset}},
            }
        )
    )  # fmt: skip
    shown = run("workflow", "--config", file, "--model", "tiny", "--tokens")
    assert shown.returncode == 0, shown.stderr
    first, second = shown.stdout.index("assistant (step 0)"), shown.stdout.index("assistant (step 1, policy rival)")
    assert first < shown.stdout.index("Better that.") < second
    assert "reward 0.25 by the workflow" in shown.stdout and "reward -0.25 of policy rival" in shown.stdout


@pytest.mark.slow
def test_the_error_of_a_workflow_has_its_traceback(agent: Path) -> None:
    task = json.dumps({"question": "How many?", "answer": "3"})
    shown = run("workflow", f"{agent}:broken", "--task", task)
    assert shown.returncode != 0
    assert 'return task["no_such_column"]' in shown.stderr and "KeyError: 'no_such_column'" in shown.stderr
    assert "rft_platform" not in shown.stderr, "the platform's frames are left out"


def test_a_slow_run_is_noted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rft_platform.run import debug

    monkeypatch.setattr(debug, "SLOW_S", 0.05)
    with debug._slow_noted(1800):
        time.sleep(0.5)
    assert "still runs after 0.05 s; after 1800 s (explorer.max_timeout) it is ended" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_answers_with_the_log_prob_of_each_token() -> None:
    found = json.loads(run("model", "How are you?", "--max-tokens", "6", "--json").stdout)
    (call,) = found["calls"]
    assert len(call["rollout_logprobs"]) == len(call["response_ids"]) <= 6
    assert all(value < 0 for value in call["rollout_logprobs"])


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("some-org/absent-model", "the hub cannot be reached from here and the model is not in its cache: connect"),
        ("no/such/folder", "it is no name of a model of the hub: correct the name"),
    ],
)
def test_an_absent_model_is_refused_with_what_to_do(
    rft: Callable[..., Result], home: object, monkeypatch: pytest.MonkeyPatch, model: str, why: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused = rft("debug", "model", "Hello?", "--model", model)
    message = " ".join(refused.output.split())
    assert refused.exit_code == 2 and f"{model!r}: there is no such folder, and {why}" in message
    assert "expected a folder with config.json, weights and tokenizer, or a model of the Hugging Face hub" in message


def test_a_judge_on_a_response(rft: Callable[..., Result], home: object) -> None:
    task = json.dumps({"question": "What is 1+1?", "answer": "2"})
    for response, reward in (("It is 2.", 1.0), ("It is 3.", 0.0)):
        shown = rft("debug", "judge", response, "--judge", "numeric", "--task", task, "--json")
        found = json.loads(shown.stdout)
        assert (found["reward"], found["reward_parts"]) == (reward, {"numeric": reward})


def test_a_reward_that_does_not_fit_pass_rates_has_a_note(
    rft: Callable[..., Result], home: object, tmp_path: Path
) -> None:
    (tmp_path / "judges.py").write_text("def points(task, response):\n    return float(response)\n")
    judge = f"{tmp_path / 'judges.py'}:points"
    for response, noted in (("1000", True), ("-2", True), ("0.5", False), ("1", False)):
        shown = rft("debug", "judge", "--judge", judge, "--task", "{}", "--", response)
        assert shown.exit_code == 0, shown.output
        assert ("pass rates count a run as passed from a reward of 1" in shown.stdout) == noted


def test_tasks_and_judge_of_a_file(rft: Callable[..., Result], home: object, write_config: Callable[..., Path]) -> None:
    shown = rft("debug", "judge", "no idea", "--config", write_config(), "--task", "3")
    assert shown.exit_code == 0, shown.output
    assert "reward 0 by exact_match" in shown.stdout


@pytest.fixture
def sliced(write_config: Callable[..., Path]) -> Path:
    """A file whose taskset is a part of a dataset with its own columns and a judge that needs an answer."""
    columns = {"prompt_key": "problem", "response_key": "reward_model.solution"}
    taskset = {"path": "train.jsonl", "split": "train[8:12]", "limit": 2, "format": columns, "judge": "numeric"}
    return write_config(buffer={"batch_size": 1, "total_steps": 1, "explorer_input": {"taskset": taskset}})


@pytest.mark.parametrize(
    "task",
    [
        {"question": "What is 1+1?", "answer": "2"},
        {"problem": "What is 1+1?", "answer": "2"},
        {"problem": "What is 1+1?", "reward_model": {"solution": "2"}},
    ],
)
def test_a_task_as_json_with_the_columns_of_a_file(
    rft: Callable[..., Result], home: object, sliced: Path, task: dict[str, object]
) -> None:
    shown = rft("debug", "judge", "It is 2.", "--config", sliced, "--task", json.dumps(task), "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["reward"] == 1.0


def test_a_task_as_json_without_an_answer_cannot_be_compared(
    rft: Callable[..., Result], home: object, sliced: Path
) -> None:
    refused = rft("debug", "judge", "It is 2.", "--config", sliced, "--task", '{"question": "What is 1+1?"}')
    assert refused.exit_code == 2 and "response_key" in refused.output


@pytest.mark.slow
@pytest.mark.parametrize("prompt_key", ["problem", None])
def test_a_model_with_the_settings_of_a_file(write_config: Callable[..., Path], prompt_key: str | None) -> None:
    taskset = {
        "path": "train.jsonl", "split": "train[8:12]", "judge": "math", "workflow": "tool_call",
        "format": {"prompt_key": prompt_key, "response_key": "solution", "system_prompt": "Be brief."},
    }  # fmt: skip
    file = write_config(buffer={"batch_size": 1, "total_steps": 1, "explorer_input": {"taskset": taskset}})
    asked = run("model", "How are you?", "--config", file, "--model", "tiny", "--max-tokens", "4", "--json")
    assert asked.returncode == 0, asked.stderr
    found = json.loads(asked.stdout)
    assert [message["content"] for message in found["calls"][0]["messages"]][:2] == ["Be brief.", "How are you?"]
    assert found["judge"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("workflow",), "name a workflow"),
        (("workflow", "no_module_of_this_name:run"), "cannot import no_module_of_this_name"),
        (("judge", "42", "--task", '{"question": "Why?"}'), "there is no judge"),
        (("judge", "42", "--judge", "no_such_judge"), "unknown judge 'no_such_judge'"),
        (("judge", "42", "--judge", "numeric", "--judge-args", "{"), "--judge-args '{': expected JSON"),
        (("judge", "42", "--judge", "judge.py"), "judge 'judge.py': names a file without a function; write judge.py:"),
        (("workflow", "agent.py"), "workflow 'agent.py': names a file without a function; write agent.py:solve"),
        (("judge", "42", "--judge", "numeric", "--task", "7"), "expected a number from 0 to 0"),
        (("judge", "42", "--judge", "numeric", "--task", "²"), "expected a number from 0 to 0"),
        (("judge", "42", "--judge", "numeric", "--task", "{"), "--task: expected a number or a JSON object"),
    ],
)
def test_bad_input_is_refused(
    rft: Callable[..., Result], home: object, arguments: tuple[str, ...], message: str
) -> None:
    shown = rft("debug", *arguments)
    assert shown.exit_code == 2
    assert message in shown.output


def test_a_section_without_keys_is_refused(rft: Callable[..., Result], home: object, tmp_path: Path) -> None:
    (tmp_path / "rft.yaml").write_text("model:\nbuffer: {explorer_input: }\n")
    shown = rft("debug", "judge", "42", "--config", tmp_path / "rft.yaml")
    assert shown.exit_code == 2
    assert "model: got None; expected a section" in shown.output
    assert "buffer.explorer_input: got None; expected a section" in shown.output


def test_a_draft_needs_no_dataset_if_the_command_gives_the_task(
    rft: Callable[..., Result], home: object, tmp_path: Path
) -> None:
    (tmp_path / "rft.yaml").write_text("buffer: {explorer_input: {taskset: {judge: numeric}}}\n")
    task = '{"question": "1 + 1", "answer": "2"}'
    shown = rft("debug", "judge", "2", "--config", tmp_path / "rft.yaml", "--task", task)
    assert shown.exit_code == 0 and "reward 1" in shown.output, shown.output


def test_an_unknown_taskset_names_those_of_the_file(
    rft: Callable[..., Result], home: object, write_config: Callable[..., Path]
) -> None:
    shown = rft("debug", "judge", "42", "--config", write_config(), "--taskset", "trian")
    assert shown.exit_code == 2
    assert "--taskset trian: the file has the tasksets train, test" in shown.output
