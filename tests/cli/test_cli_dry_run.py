"""The dry run finds what a run would stumble over later, and says what it read."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import Result

from rft_platform.common.errors import UserError
from rft_platform.common.files import write_sealed_json, write_text
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.online.project import project_in
from rft_platform.run import checks, data_checks, project_checks, start
from rft_platform.run.project_checks import check_may_start

WriteConfig = Callable[..., Path]
Rft = Callable[..., Result]


def refused(result: Result, home: Home) -> str:
    """The lines of a dry run that refused the configuration, having made nothing."""
    assert result.exit_code == 2, result.output
    assert not home.root.exists()
    return result.stderr


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"name": "../../etc"}, "name '../../etc': has the character '/'"),
        ({"engine": {"kind": "vllm"}}, "has no vLLM"),
        (
            {"explorer": {"rollout_model": {"tool_call_parser": "llama3_json"}}},
            "tool_call_parser 'llama3_json': the transformers engine supports hermes",
        ),
        (
            {"explorer": {"rollout_model": {"reasoning_parser": "olmo3"}}},
            "reasoning_parser 'olmo3': the transformers engine supports deepseek_r1, qwen3",
        ),
        (
            {"model": {"model_path": "models:/other@champion"}},
            "model.model_path models:/other@champion: no such version in sqlite:///",
        ),
        (
            {"model": {"model_path": "model", "custom_chat_template": "missing.jinja"}},
            "model.custom_chat_template: chat template 'missing.jinja': neither a file that can be read (",
        ),
        ({"model": {"model_path": "model", "custom_chat_template": "{% for"}}, "the chat template is not valid Jinja"),
        (
            {"model": {"model_path": "model", "custom_chat_template": "{{ messages | nosuch }}"}},
            "the chat template is not valid Jinja: No filter named 'nosuch'",
        ),
        ({"model": {"model_path": "models:/other"}}, "expected models:/NAME@alias or models:/NAME/3"),
        (
            {"algorithm": {"algorithm_type": "gkd", "teacher_model_path": "models:/big@champion"}},
            "algorithm.teacher_model_path models:/big@champion: no such version in sqlite:///",
        ),
    ],
)
def test_what_cannot_start_is_refused(
    home: Home,
    write_config: WriteConfig,
    rft: Rft,
    monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, Any],
    expected: str,
) -> None:
    monkeypatch.delenv("RFT_VLLM_PYTHON", raising=False)

    assert expected in refused(rft("run", "--config", write_config(**sections), "--dry-run"), home)


def test_a_column_by_a_default_of_another_system_is_explained(home: Home, write_config: WriteConfig, rft: Rft) -> None:
    line = refused(rft("run", "--config", write_config(trainer={"use_dynamic_bsz": True}), "--dry-run"), home)
    assert "train.jsonl: no column 'prompt' and no column 'response'; the columns are question, answer" in line
    for key, column in (("prompt_key", "prompt"), ("response_key", "response")):
        assert (
            f"buffer.explorer_input.taskset.format.{key} is not set: it is {column}, the default of Trinity-RFT, taken "
            "because the file has trainer.use_dynamic_bsz"
        ) in line


def test_prompts_beyond_the_context_are_counted_and_refused_where_none_fits(
    home: Home, write_config: WriteConfig, rft: Rft, tmp_path: Path, tiny_model: Path
) -> None:
    file = write_config(model={"model_path": "model", "max_model_len": 64})
    shutil.rmtree(tmp_path / "model")
    shutil.copytree(tiny_model, tmp_path / "model")
    rows = [{"question": "12+" * count, "answer": "1"} for count in (2, 40, 50)]
    write_text(tmp_path / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    planned = rft("run", "--config", file, "--dry-run")
    assert planned.exit_code == 0, planned.output
    counted = "longest prompt 150 tokens without the chat template in a context of 64, 2 prompts are too long"
    assert f"train.jsonl: 3 rows, 3 tasks; {counted}" in planned.stdout
    assert f"explored   {tmp_path / 'train.jsonl'}: workflow" in planned.stdout, "a file has no splits"
    assert "buffer.batch_size 8 is more than the 3 tasks: a batch repeats tasks" in planned.stdout

    write_text(tmp_path / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows[1:]))
    assert "no prompt fits: the shortest have 120 tokens, and the context is 64" in refused(
        rft("run", "--config", file, "--dry-run"), home
    )


def test_prompts_too_long_beyond_those_that_are_counted_are_not_counted_out(
    write_config: WriteConfig, rft: Rft, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_checks, "_COUNTED", 2)
    rows = [{"question": "12+" * count, "answer": "1"} for count in (2, 40, 50, 60)]
    file = write_config(model={"model_path": str(tiny_model), "max_model_len": 64})
    write_text(tmp_path / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    planned = rft("run", "--config", file, "--dry-run")
    assert "in a context of 64, at least 2 prompts are too long" in planned.stdout


def test_rows_without_a_prompt_column_have_no_prompts_to_measure(
    write_config: WriteConfig, rft: Rft, tmp_path: Path, tiny_model: Path
) -> None:
    columns = {"prompt_key": None, "response_key": None}
    taskset = {"path": "train.jsonl", "workflow": "tool_call", "judge": "tool_use", "format": columns}
    file = write_config(
        model={"model_path": str(tiny_model), "max_model_len": 64},
        buffer={"batch_size": 2, "total_steps": 1, "explorer_input": {"taskset": taskset}},
    )
    call = {"role": "user", "content": "1+1"}
    rows = [{"conversations": [call], "tools": [{"name": "add", "description": "x" * 900}], "n": n} for n in range(4)]
    write_text(tmp_path / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    planned = rft("run", "--config", file, "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert "train.jsonl: 4 rows, 4 tasks\n" in planned.stdout and "longest prompt" not in planned.stdout


def test_a_length_above_the_limit_of_the_model_is_noticed(
    home: Home, write_config: WriteConfig, rft: Rft, tiny_model: Path
) -> None:
    def planned(length: int) -> str:
        file = write_config(model={"model_path": str(tiny_model), "max_model_len": length})
        result = rft("run", "--config", file, "--dry-run")
        assert result.exit_code == 0, result.output
        return " ".join(result.stdout.split())

    assert "model.max_model_len 8,192 is above max_position_embeddings 4,096 of" in planned(8192)
    assert "max_position_embeddings" not in planned(4096)


def test_the_limit_of_a_model_in_the_cache_is_noticed(
    home: Home, write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    write_text(tmp_path / "models--owner--model/refs/main", "1")
    write_text(tmp_path / "models--owner--model/snapshots/1/config.json", '{"max_position_embeddings": 4096}')
    project = project_in(home, load_config(write_config(model={"model_path": "owner/model", "max_model_len": 16384})))
    (found,) = data_checks.context_notices(project)
    assert found.text.startswith("model.max_model_len 16,384 is above max_position_embeddings 4,096 of owner/model")


def test_the_plan_names_the_limit_and_a_model_that_must_be_fetched(
    home: Home, write_config: WriteConfig, rft: Rft, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path / "agent.py", "def solve(task, model):\n    pass\n")
    taskset = {"path": "train.jsonl", "limit": 3, "workflow": "agent.py:solve"}
    file = write_config(
        model={"model_path": "owner/model"},
        algorithm={"algorithm_type": "on_policy_distill", "teacher_model_path": "owner/teacher"},
        buffer={"batch_size": 2, "total_steps": 1, "explorer_input": {"taskset": taskset}},
    )

    planned = rft("run", "--config", file, "--dry-run")

    assert planned.exit_code == 0, planned.output
    assert "16 rows, 3 tasks (limit 3); longest prompt about" in planned.stdout
    assert "tokens without the chat template and what the workflow adds (system prompt, tools)" in planned.stdout
    for named in ("model.model_path owner/model", "algorithm.teacher_model_path owner/teacher"):
        assert f"{named}: neither a folder here nor in the Hugging Face cache" in planned.stdout


def test_the_demonstrations_of_a_warm_start_are_read(
    home: Home, write_config: WriteConfig, rft: Rft, tmp_path: Path
) -> None:
    shown = [f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in (*range(6), 0)]
    write_text(tmp_path / "shown.jsonl", "".join(shown))
    warm_start = {"path": "shown.jsonl", "batch_size": 4, "epochs": 2, "stop_at": 0.4}
    said = refused(rft("run", "--config", write_config(warm_start=warm_start), "--dry-run"), home)
    assert "shown.jsonl: no column 'question'; the columns are prompt, answer. " in said
    assert "Set warm_start.format.prompt_key to the column of the prompt" in said and "taskset" not in said

    warm_start["format"] = {"prompt_key": "prompt"}
    planned = rft("run", "--config", write_config(warm_start=warm_start), "--dry-run").stdout
    assert "shown.jsonl: 6 rows, 4 a step, at most 3 optimiser steps, until sampled_pass reaches 0.4" in planned
    assert "shown.jsonl: left out 1 duplicate (first: shown.jsonl:7) of 7 rows" in planned


def test_a_home_is_free_until_a_phase_has_left_something(home: Home, write_config: WriteConfig) -> None:
    start.write_config(home, load_config(write_config(name="first")))

    check_may_start(home, load_config(write_config(name="second", seed=7)))
    write_sealed_json(home.rounds / "r0000" / "policy-policy.json", {})
    with pytest.raises(UserError, match="holds the project sums/first, not sums/second"):
        check_may_start(home, load_config(write_config(name="second")))
    with pytest.raises(UserError, match=r"restore the previous values.*another RFT_HOME"):
        check_may_start(home, load_config(write_config(name="first", seed=7)))


def test_a_finished_project_needs_no_room(
    home: Home, write_config: WriteConfig, rft: Rft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project_checks, "_LEAST_FREE", 10**18)
    file = write_config()
    assert "no space" in refused(rft("run", "--config", file, "--dry-run"), home)

    monkeypatch.setattr(project_checks, "is_finished", lambda project: True)
    assert rft("run", "--config", file, "--dry-run").exit_code == 0


def test_a_run_that_ends_within_its_warm_up_is_planned_with_a_notice(
    home: Home, write_config: WriteConfig, rft: Rft
) -> None:
    optimizer = {"lr_scheduler_type": "linear", "lr_warmup_steps": 10}
    file = write_config(algorithm={"algorithm_type": "grpo", "repeat_times": 4, "optimizer": optimizer})

    planned = rft("run", "--config", file, "--dry-run", "--rounds", "1")

    assert planned.exit_code == 0, planned.output
    assert "algorithm.optimizer.lr_warmup_steps 10 is not less than the 1 steps of the run" in planned.stdout


@pytest.mark.slow
def test_a_terminal_shows_what_is_checked_and_clears_it(
    home: Home, write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no model is accepted yet
    shown = io.StringIO()
    monkeypatch.setattr(checks, "notes", lambda: Console(file=shown, force_terminal=True, width=80))
    checks.check_run(home, load_config(write_config(model={"model_path": str(tiny_model)})), dry=True)
    assert "checking that the trainer accepts the model" in shown.getvalue()  # the checks before it may end too soon
    assert shown.getvalue().endswith("\x1b[2K"), "the line is cleared"
