"""``tune()`` with real processes: interrupted in a script, gone on with from the shell."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.experience.store import ExperienceStore

SCRIPT = """
from rft_platform.tuner import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune


async def solve(task, model, auxiliary_models):
    assert auxiliary_models == {}
    client = model.get_openai_async_client()
    messages = [{"role": "user", "content": task["ask"]}]
    answer = await client.chat.completions.create(model=model.model_name, messages=messages)
    text = answer.choices[0].message.content
    return WorkflowOutput(response=text, reward=-1.0, metrics={"letters": len(text)})


async def judge(task, response):
    return JudgeOutput(reward=len(response) / 30, metrics={"spaces": response.count(" ")})


if __name__ == "__main__":
    tune(
        workflow_func=solve,
        judge_func=judge,
        train_dataset=DatasetConfig(path="data", total_steps=40),
        eval_dataset=DatasetConfig(path="data", split="test"),
        model=TunerModelConfig(model_path="model", max_model_len=64, max_tokens=6),
        algorithm=AlgorithmConfig(group_size=2, batch_size=4, learning_rate=1e-4, eval_interval_steps=30),
        experiment_name="mine",
    )
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "data").mkdir()
    for split, count in (("train", 8), ("test", 3)):
        rows = [{"ask": f"{split} {number}+1=?"} for number in range(count)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "model").symlink_to(tiny_model)
    (tmp_path / "main.py").write_text(SCRIPT)
    return tmp_path


def environment() -> dict[str, str]:
    return {**os.environ, "RFT_HOME": "/nowhere/else", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def interrupted(folder: Path, after: str) -> str:
    """What the script says when Ctrl-C comes once ``after`` was said."""
    command = [sys.executable, "main.py"]
    said = ""
    with subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True) as script:
        assert script.stderr is not None
        for line in script.stderr:
            said += line
            if after in line:
                script.send_signal(signal.SIGINT)
                break
        said += script.stderr.read()
    assert script.returncode in (-signal.SIGINT, 1, 130), said
    return said


@pytest.mark.slow
def test_an_interrupted_script_returns_to_the_shell(folder: Path) -> None:
    said = interrupted(folder, after="start  held-out")
    experiment = folder / "checkpoints" / "AgentScope" / "mine"
    home = Home(experiment / ".rft")
    assert "interrupted: tune(..., experiment_name='mine') continues this run" in said
    resume = f"or, from this folder: RFT_HOME={home.root.relative_to(folder)} "
    assert resume in said and f"run --config {home.config_file}" in said.partition(resume)[2], said
    assert said.count('  File "') <= 3 and "DagsterExecutionInterruptedError" not in said, said
    _assert_nothing_runs(home)
    begun = (home.rounds / "r0000" / "evaluation.json").stat().st_mtime_ns
    assert load_config(home.config_file).model.model_path == str((folder / "model").resolve())

    command = [
        *(sys.executable, "-m", "rft_platform", "tune", "main.py:solve", "--judge", "main.py:judge"),
        *("--dataset", "data", "--total-steps", "1", "--eval-dataset", "data", "--model", "model"),
        *("--max-model-len", "64", "--max-tokens", "6", "--group-size", "2", "--batch-size", "4"),
        *("--learning-rate", "1e-4", "--eval-interval-steps", "30", "--experiment", "mine", "--json", "result.json"),
    ]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"every row      RFT_HOME={home.root.relative_to(folder)} " in done.stderr
    assert (home.rounds / "r0000" / "evaluation.json").stat().st_mtime_ns == begun  # not done again
    _assert_nothing_runs(home)
    _assert_result(json.loads((folder / "result.json").read_text()), experiment)
    _assert_rows(home)


def _assert_nothing_runs(home: Home) -> None:
    assert not home.cluster.running()
    deadline = time.monotonic() + 10
    while left := [p for p in psutil.process_iter(["cmdline"]) if str(home.root) in " ".join(p.info["cmdline"] or [])]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _assert_result(result: dict[str, Any], experiment: Path) -> None:
    assert (result["project"], result["experiment"]) == ("AgentScope", "mine")
    assert (Path(result["checkpoint"]) / "model.safetensors").is_file()
    assert Path(result["checkpoint"]) == experiment / f"global_step_{result['steps']}"
    steps = [record["step"] for record in result["history"]]
    assert (steps, result["steps"]) == ([0, 1], 1)
    assert [record["round"] for record in result["history"]] == [0, 1]
    assert all(0 <= record["reward"] <= 1 for record in result["history"][1:])
    assert [record["step"] for record in result["history"] if record["eval"]] == [0, 1]  # the start and the end
    assert any("letters" in name for name in result["history"][0]["eval"])
    assert any("spaces" in name for name in result["history"][0]["eval"])
    assert result["model_version"].startswith("models:/AgentScope-mine/") and result["mlflow_run_id"]
    assert len(result["dagster_run_ids"]) >= 3
    assert list((experiment / "monitor" / "tensorboard").rglob("*tfevents*"))


def _assert_rows(home: Home) -> None:
    """The judge's reward, not the workflow's, with its metrics as parts; the workflow's on the last step."""
    store = ExperienceStore(home.rounds)
    rollouts = store.rollout_rows(1)
    assert len(rollouts) == 8 and all(row.run_reward == -1.0 and "letters" in row.metrics for row in rollouts)
    judged = store.judged_rows(1)
    assert all(row.reward >= 0 and "main:judge/spaces" in row.reward_parts for row in judged)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["main.py:nothing"], "main.py has no 'nothing'"),
        (["main.py:judge"], "workflow 'main.py:judge': Workflow function validation failed for 'judge': Missing"),
        (["main.py:solve", "--judge", "main.py:solve"], "judge 'main.py:solve': Judge function validation failed"),
        (["main.py:solve", "--dataset", "data", "--temperature", "1"], "--temperature needs --model"),
        (
            ["main.py:solve", "--model", "model", "--max-model-len", "0"],
            "--max-model-len 0: Input should be greater",
        ),
        (["main.py:solve", "--dataset", "data", "--model", "model"], "--max-model-len is missing: give it too"),
        (
            ["main.py:solve", "--dataset", "data", "--model", "rft-has-none/modell", "--max-model-len", "64"],
            "model.model_path 'rft-has-none/modell': there is no such folder, and ",
        ),
        (["main.py:solve", "--dataset", "nowhere.jsonl", "--model", "model", "--max-model-len", "64"], "no such file"),
        (["main.py:solve", "--dataset", "data"], "or in the shell --model and --max-model-len"),
    ],
)
def test_bad_input_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str) -> None:
    from typer.testing import CliRunner

    from rft_platform.cli.main import app

    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["tune", *options])
    assert done.exit_code == 2
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not (folder / "checkpoints").exists()
