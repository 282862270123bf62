"""``rft config``: explain a key, show what a file resolves to, convert files of other systems."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from typer.testing import Result

from rft_platform.config.load import load_config, read_yaml
from rft_platform.config.reference import keys

Rft = Callable[..., Result]
FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted({*FOLDER.glob("*.yaml"), *FOLDER.glob("*/rft.yaml")})  # further files have names of Trinity-RFT


def test_explain_gives_type_default_and_meaning(rft: Rft) -> None:
    shown = rft("config", "explain", "model.temperature")
    assert shown.exit_code == 0
    assert "Sampling temperature" in shown.stdout and "number, ≥ 0" in shown.stdout and "default: 1" in shown.stdout


def test_explain_lists_the_keys_of_a_section(rft: Rft) -> None:
    shown = rft("config", "explain", "algorithm.rollout_correction")
    assert "weight_cap" in shown.stdout and "token_veto" in shown.stdout


def test_every_key_can_be_explained(rft: Rft) -> None:
    every = [key for key, _ in keys()]
    for key in every[:: len(every) // 40]:
        shown = rft("config", "explain", key)
        assert shown.exit_code == 0, (key, shown.output)


def test_explain_resolves_trinity_keys_and_suggests_similar_names(rft: Rft) -> None:
    assert "has no effect" in rft("config", "explain", "buffer.trainer_input.experience_buffer.capacity").stdout
    assert "is read as cluster.namespace" in rft("config", "explain", "ray_namespace").stdout
    taskset = "buffer.explorer_input.taskset"
    for key, text in (
        (f"{taskset}.data_selector", f"is read as {taskset}.task_selector"),
        ("buffer.explorer_input.default_workflow_type", "is read as workflow of the tasksets that set none"),
        (f"{taskset}.reward_fn_type", "is read as judge"),
        ("trainer.trainer_config.critic.optim.lr", "are read as algorithm.critic"),
    ):
        assert text in rft("config", "explain", key).stdout
    shown = rft("config", "explain", "algorithm.lr")
    assert shown.exit_code == 2 and "did you mean algorithm.optimizer.lr?" in shown.output


def test_show_names_changed_keys_and_derived_settings(
    rft: Rft, home: object, write_config: Callable[..., Path]
) -> None:
    file = write_config(model={"model_path": "model", "temperature": 0.7})
    shown = rft("config", "show", "--config", file)
    assert "model.temperature" in shown.stdout and "0.7" in shown.stdout
    assert "model.top_p" not in shown.stdout and "batches.repeat_times" in shown.stdout
    found = json.loads(rft("config", "show", "--config", file, "--json").stdout)
    assert found["settings"]["model"]["top_p"] == 1.0 and found["derived"]["batches"]["batch_size"] == 8


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_convert_trl(rft: Rft, tmp_path: Path, kind: str) -> None:
    given = {"model_name_or_path": "m", "dataset_name": "t.jsonl", "num_generations": 4, "report_to": "wandb"}
    file, target = tmp_path / f"grpo.{kind}", tmp_path / "rft.yaml"
    file.write_text(json.dumps(given) if kind == "json" else yaml.safe_dump(given))
    shown = rft("config", "convert", file, "--to", target)
    assert shown.exit_code == 0, shown.output
    assert "report_to has no effect here" in shown.stderr
    assert load_config(target).algorithm.repeat_times == 4
    again = rft("config", "convert", file, "--to", target)
    assert again.exit_code == 2 and "the file exists" in again.output


@pytest.mark.parametrize("command", [("new",), ("config", "convert", "?", "--to"), ("config", "schema", "--to")])
def test_a_target_that_cannot_be_written_is_named(rft: Rft, tmp_path: Path, command: tuple[str, ...]) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text("model_name_or_path: m\ndataset_name: t.jsonl\nnum_generations: 4\n")
    target = file / "target"
    shown = rft(*(file if word == "?" else word for word in command), target)
    assert shown.exit_code == 2, shown.output
    (line,) = shown.stderr.splitlines()
    assert line.startswith(f"error: {target}: cannot be written (") and "RFT_HOME" not in line


def test_convert_trinity(rft: Rft, tmp_path: Path) -> None:
    file = tmp_path / "trinity.yaml"
    taskset = {"path": "t.jsonl", "default_workflow_type": "math_workflow"}
    file.write_text(
        yaml.safe_dump(
            {
                "project": "p", "name": "n", "model": {"model_path": "m"}, "algorithm": {"repeat_times": 4},
                "buffer": {"batch_size": 4, "total_steps": 1, "explorer_input": {"taskset": taskset}},
                "trainer": {"ulysses_sequence_parallel_size": 2},
            }
        )
    )  # fmt: skip
    shown = rft("config", "convert", file)
    assert shown.exit_code == 0, shown.output
    assert "ulysses_sequence_parallel_size has no effect here" in shown.stderr
    assert "default_workflow_type" not in shown.stdout
    file_of_ours = tmp_path / "rft.yaml"
    file_of_ours.write_text(shown.stdout)
    assert load_config(file_of_ours) == load_config(file)  # also what Trinity's defaults decide: ppo, weight decay


def test_files_of_other_systems_are_refused(rft: Rft, tmp_path: Path) -> None:
    file, target = tmp_path / "other.yaml", tmp_path / "rft.yaml"
    verl = {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_files": "gsm8k"},
        "actor_rollout_ref": {"model": {}},
    }
    axolotl = {"base_model": "Qwen/Qwen3-0.6B", "micro_batch_size": 2}
    for content, message in (
        (verl, "actor_rollout_ref is a section of verl"),
        (axolotl, "no configuration of Trinity"),
    ):
        file.write_text(yaml.safe_dump(content))
        shown = rft("config", "convert", file, "--to", target)
        assert shown.exit_code == 2 and message in shown.output and not target.exists()
    file.write_text(yaml.safe_dump(verl))
    assert "section of verl" in rft("run", "--config", file, "--dry-run").output


def test_the_schema_accepts_configurations_and_refuses_typos(rft: Rft, tmp_path: Path) -> None:
    printed = json.loads(rft("config", "schema").stdout)
    Draft202012Validator.check_schema(printed)
    validator = Draft202012Validator(printed)
    for file in EXAMPLES:
        validator.validate(read_yaml(file))
    validator.validate({"buffer": {"batch_size": "${oc.env:TASKS,8}"}, "seed": "${buffer.batch_size}"})
    validator.validate({"mode": "${oc.env:MODE,both}", "monitor": {"monitor_type": "wandb"}})
    for wrong in (
        {"buffer": {"batch_sice": 8}},
        {"buffer": {"batch_size": "eight"}},
        {"buffer": {"batch_size": 0}},
        {"mode": "bth"},
    ):
        assert not validator.is_valid(wrong)
    assert rft("config", "schema", "--to", tmp_path / "s.json").exit_code == 0
    assert json.loads((tmp_path / "s.json").read_text()) == printed


def test_a_written_configuration_names_the_schema_beside_it(rft: Rft, tmp_path: Path) -> None:
    file, target = tmp_path / "grpo.yaml", tmp_path / "rft.yaml"
    file.write_text("{model_name_or_path: m, num_generations: 4}")
    assert rft("config", "convert", file, "--to", target).exit_code == 0
    line = target.read_text().splitlines()[0]
    assert (target.parent / line.removeprefix("# yaml-language-server: $schema=")).is_file()
