"""Bad input: one clear line, exit code 2, nothing written."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from rft_platform.common.files import write_text
from rft_platform.config.home import Home


def buffer(**taskset: Any) -> dict[str, Any]:
    return {
        "batch_size": 8,
        "total_steps": 2,
        "explorer_input": {"taskset": {"path": "train.jsonl", **taskset}, "eval_tasksets": [{"path": "test.jsonl"}]},
    }


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"buffer": {"batchsize": 8}}, "unknown key buffer.batchsize; did you mean buffer.batch_size?"),
        ({"buffer": buffer(path="trian.jsonl")}, "trian.jsonl: no such file"),
        ({"buffer": buffer(path="./loop")}, "loop: no such file"),
        ({"buffer": buffer(path="")}, "buffer.explorer_input.taskset.path '': no such file or folder; give a file"),
        ({"buffer": buffer(format={"prompt_key": "questoin"})}, "no column 'questoin'"),
        ({"buffer": buffer(path="empty.jsonl")}, "the dataset is empty"),
        ({"buffer": buffer(judge="exact_mtch")}, "did you mean 'exact_match'?"),
        (
            {"buffer": buffer(judge="regex", judge_args={"pattern": "(("})},
            "argument 'pattern' of judge 'regex' is '((': no regular expression of Python: missing )",
        ),
        (
            {"buffer": buffer(judge=[{"judge": "format", "args": {"pattern": "a{2,1}"}}])},
            "argument 'pattern' of judge 'format' is 'a{2,1}': no regular expression of Python: min repeat greater",
        ),
        ({"buffer": buffer(workflow="nowhere:solve")}, "cannot import nowhere"),
        ({"model": {"model_path": "bare"}}, "contains no tokenizer"),
        ({"model": {"model_path": "weightless"}}, "contains no .safetensors file"),
        ({"algorithm": {"algorithm_type": "grop"}}, "did you mean 'grpo'?"),
        ({"mode": "serve"}, "mode serve"),
    ],
)
def test_run_refuses(
    home: Home,
    write_config: Callable[..., Path],
    rft: Callable[..., Result],
    sections: dict[str, Any],
    said: str,
) -> None:
    config = write_config(**sections)
    folder = config.parent
    write_text(folder / "empty.jsonl", "")
    (folder / "loop").symlink_to("loop")
    write_text(folder / "bare" / "config.json", "{}")
    write_text(folder / "weightless" / "config.json", '{"model_type": "qwen3"}')
    write_text(folder / "weightless" / "tokenizer.json", "{}")

    result = rft("run", "--config", config)

    assert result.exit_code == 2, result.output
    assert [line for line in result.stderr.splitlines() if said in line and line.startswith("error: ")]
    assert len(result.stderr.splitlines()) == 1
    assert not home.root.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            '{"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768}',
            "model.model_path: MistralForCausalLM has sliding_window 4096 in config.json, but rows can have 32768",
        ),
        ('{"model_type": "gpt_oss"}', "model.model_path: GptOssForCausalLM cannot be trained: its attention has sinks"),
        ('{"model_type": "no_such_model"}', "transformers cannot build a causal LM from its config.json"),
        (
            '{"model_type": "qwen3", "hidden_size": "many"}',
            "transformers cannot build a causal LM from its config.json",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_anything_starts(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result], settings: str, message: str
) -> None:
    config = write_config()
    write_text(config.parent / "model" / "config.json", settings)

    result = rft("run", "--config", config, "--dry-run")

    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not home.root.exists()


@pytest.mark.slow
def test_an_adapter_that_the_model_cannot_have_is_refused_before_anything_starts(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    for modules, code in (["nope"], 2), (["q_proj"], 0):
        config = write_config(model={"model_path": "model", "lora_configs": [{"target_modules": modules}]})
        result = rft("run", "--config", config, "--dry-run")
        assert result.exit_code == code, result.output
        assert ("model.model_path: target_modules ['nope'] of model.lora_configs" in result.stderr) == (code == 2)
    assert not home.root.exists()


def test_a_window_that_no_row_outgrows_is_accepted(
    write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    config = write_config(model={"model_path": "model", "max_model_len": 4096})
    settings = '{"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768}'
    write_text(config.parent / "model" / "config.json", settings)
    assert rft("run", "--config", config, "--dry-run").exit_code == 0


def test_all_problems_are_reported_together(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    config = write_config(buffer=buffer(judge="exact_mtch", format={"prompt_key": "questoin"}))

    result = rft("run", "--config", config)

    assert result.exit_code == 2
    assert "exact_mtch" in result.stderr
    assert "questoin" in result.stderr


@pytest.mark.slow
def test_the_real_command_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    program = "from rft_platform.cli.main import main; main()"
    command = [sys.executable, "-c", program, "run", "--config", "missing.yaml"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'missing.yaml'}: no such configuration file")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_needs_none_of_the_heavy_parts() -> None:
    heavy = "torch", "transformers", "dagster", "mlflow", "pyarrow", "numpy", "pydantic"
    program = f"""
import sys
from typer.testing import CliRunner
from rft_platform.cli.main import app
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
print([name for name in {heavy!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "[]\n"


@pytest.mark.parametrize("command", [["rounds"], ["trace", "r0001"], ["eval"]])
def test_commands_without_a_project_report_its_absence(
    home: Home, rft: Callable[..., Result], command: list[str]
) -> None:
    result = rft(*command)

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: no project in {home.root}")
    assert not home.root.exists()


def test_home_that_is_a_file(home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]) -> None:
    write_text(home.root, "not a folder")

    result = rft("run", "--config", write_config())

    assert result.exit_code == 2
    assert "is a file; point RFT_HOME at a folder" in result.stderr


@pytest.mark.parametrize("mode", ["both", "explore"])
def test_a_folder_of_checkpoints_that_cannot_be_created_is_refused_where_it_is_written(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result], mode: str
) -> None:
    config = write_config(checkpoint_root_dir="./train.jsonl/checkpoints", mode=mode)

    result = rft("run", "--config", config, "--dry-run")

    file = config.parent / "train.jsonl"
    expected = (
        f"checkpoint_root_dir {file}/checkpoints/sums/one: {file} is a file; point checkpoint_root_dir at a folder"
    )
    assert (expected in result.stderr) == (mode == "both"), result.output
    assert result.exit_code == (2 if mode == "both" else 0)
    assert not home.root.exists()


@pytest.mark.parametrize(("name", "misread"), [("a%41", "'%41'"), ("what?", "'?'")])
def test_home_that_the_url_of_a_database_cannot_name(
    tmp_path: Path,
    write_config: Callable[..., Path],
    rft: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    misread: str,
) -> None:
    monkeypatch.setenv("RFT_HOME", str(tmp_path / name))

    result = rft("run", "--config", write_config())

    assert result.exit_code == 2
    assert f"{tmp_path / name}: {misread} has another meaning in the URLs" in result.stderr
    assert not (tmp_path / name).exists()


def test_no_room_on_the_disk(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rft_platform.run import project_checks

    monkeypatch.setattr(project_checks, "_LEAST_FREE", 2**80)

    result = rft("run", "--config", write_config())

    assert result.exit_code == 2
    assert "no space" in result.stderr
    assert not home.root.exists()


def test_faults_of_the_data_that_stop_nothing_are_noted(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    config = write_config()
    tasks = (config.parent / "train.jsonl").read_text()
    write_text(config.parent / "train.jsonl", tasks + tasks.splitlines()[0] + '\n{"question": "", "answer": "1"}\n')
    write_text(config.parent / "test.jsonl", '{"question": "100+1=", "answer": "101"}\n' + tasks.splitlines()[2] + "\n")

    result = rft("run", "--config", config, "--dry-run")

    places = "1 duplicate (first: train.jsonl:17), 1 without question (first: train.jsonl:18)"
    assert f"train.jsonl: left out {places} of 18 rows" in " ".join(result.stdout.split())
    assert "test.jsonl: 1 of 2 held-out tasks are also explored" in result.stdout


def test_held_out_episodes_of_an_environment_with_another_seed_are_not_explored(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    lake = {
        "workflow": "environment", "workflow_args": {"environment": "lake.py:Lake"}, "format": {"response_key": None},
    }  # fmt: skip
    inputs = {"taskset": {"path": "train.jsonl", **lake}, "eval_tasksets": [{"path": "test.jsonl", **lake}]}
    config = write_config(buffer={"batch_size": 8, "total_steps": 2, "explorer_input": inputs})
    write_text(
        config.parent / "lake.py", "class Lake:\n    async def reset(self, row): ...\n    step = close = reset\n"
    )
    for name, seeds in (("train", range(16)), ("test", range(15, 18))):
        rows = "".join(f'{{"question": "Reach G.", "seed": {seed}}}\n' for seed in seeds)
        write_text(config.parent / f"{name}.jsonl", rows)

    result = rft("run", "--config", config, "--dry-run")

    assert "test.jsonl: 1 of 3 held-out tasks are also explored" in result.stdout


def test_dry_run_prints_the_plan_and_writes_nothing(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    result = rft("run", "--config", write_config(), "--dry-run", "--rounds", 5)

    assert result.exit_code == 0, result.output
    assert "8 tasks x 4 runs x 1 batch = 32 experiences a round" in result.stdout
    assert "rounds: 5" in result.stdout
    assert not home.root.exists()
