"""Loading: printed files parse, faults are one line each, paths resolve, dumps load back equal."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.common.errors import UserError
from rft_platform.config.load import build_config, config_digest, dump_config, load_config
from rft_platform.config.schema.rft_config import RftConfig
from tests.support.builders import load_text

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
INPUT = "buffer: {explorer_input: {taskset: {?}}}"


def fault(folder: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        load_text(folder, text)
    return str(caught.value)


@pytest.mark.parametrize("name", ["rft.yaml", "gsm8k.yaml"])
def test_the_examples_load(name: str) -> None:
    config = load_config(EXAMPLES / name)
    assert config.buffer.explorer_input.taskset is not None
    assert config.buffer.explorer_input.taskset.path == "openai/gsm8k"


@pytest.mark.parametrize("name", ["sft.yaml", "dpo.yaml", "distill.yaml"])
def test_models_of_offline_examples_are_folders_also_before_these_exist(name: str, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / name, tmp_path)
    model = load_config(tmp_path / name).model.model_path
    assert Path(model).is_relative_to(tmp_path / "tiny")


def test_documented_defaults() -> None:
    config = RftConfig()
    assert config.mode == "both" and config.continue_from_checkpoint and config.seed == 42
    assert (config.model.temperature, config.model.top_p, config.model.top_k) == (1.0, 1.0, -1)
    assert config.algorithm.optimizer.lr == 1e-6 and config.algorithm.optimizer.clip_grad == 1.0
    assert config.explorer.runner_per_model == 8 and config.explorer.max_timeout == 1800
    assert config.explorer.max_retry_times == 2 and config.explorer.eval_interval == 100
    assert config.explorer.rollout_model.enable_prefix_caching
    assert config.synchronizer.sync_style == "fixed" and config.synchronizer.sync_timeout == 3600
    assert config.buffer.trainer_input.experience_buffer.replay_buffer.priority_fn_args.decay == 2.0
    assert config.evaluation.every == 1 and config.warm_start is None


@pytest.mark.parametrize(
    ("written", "read"),
    [("online", "nccl"), ("offline", "checkpoint"), ("memory", "memory")],
)
def test_sync_method_aliases(written: str, read: str) -> None:
    assert build_config({"synchronizer": {"sync_method": written}}).synchronizer.sync_method == read


def test_sync_style_aliases() -> None:
    for written, read in [("explorer_driven", "dynamic_by_explorer"), ("trainer_driven", "dynamic_by_trainer")]:
        assert build_config({"synchronizer": {"sync_style": written}}).synchronizer.sync_style == read


def test_taskset_aliases() -> None:
    taskset = {"path": "x", "default_workflow_type": "my.module:solve", "default_reward_fn_type": "gsm8k"}
    config = build_config({"buffer": {"explorer_input": {"taskset": taskset}}})
    assert config.buffer.explorer_input.taskset is not None
    assert config.buffer.explorer_input.taskset.workflow == "my.module:solve"
    assert config.buffer.explorer_input.taskset.judge == "gsm8k"


def test_the_interval_of_evaluations_is_one_setting() -> None:
    quoted = {"explorer": {"eval_interval": "10"}, "synchronizer": {"sync_interval": "4"}}
    assert build_config(quoted).evaluation.every == 3
    both: dict[str, Any] = {"explorer": {"eval_interval": 10}, "evaluation": {"every": 5}}
    with pytest.raises(UserError, match=r"explorer.eval_interval 10 .* and evaluation.every 5 .*are the same setting"):
        build_config(both)
    for agreeing in (both | {"synchronizer": {"sync_interval": 2}}, {"evaluation": {"every": 5}}):
        config = build_config(agreeing)
        assert config.evaluation.every == 5 and build_config(yaml.safe_load(dump_config(config))) == config


def test_one_setting_written_in_two_places_is_read_in_one() -> None:
    config = build_config(
        {
            "explorer": {"eval_interval": 10},
            "synchronizer": {"sync_interval": 4},
            "buffer": {
                "explorer_input": {"taskset": {"path": "x", "rollout_args": {"n": 6}}},
                "eval_tasksets": [{"path": "y"}],
            },
        }
    )
    assert config.algorithm.repeat_times == 6
    assert config.evaluation.every == 3
    assert [taskset.path for taskset in config.buffer.explorer_input.eval_tasksets] == ["y"]
    for other in ([], [{"path": "z"}]):
        both = {"eval_tasksets": [{"path": "y"}], "explorer_input": {"eval_tasksets": other}}
        with pytest.raises(
            UserError, match=r"buffer\.eval_tasksets and buffer\.explorer_input\.eval_tasksets are the same"
        ):
            build_config({"buffer": both})
    with pytest.raises(UserError, match="same setting"):
        taskset = {"path": "x", "rollout_args": {"n": 6}}
        build_config({"buffer": {"explorer_input": {"taskset": taskset}}, "algorithm": {"repeat_times": 4}})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {temprature: 1}", "unknown key model.temprature; did you mean model.temperature?"),
        ("modle: {model_path: x}", "unknown key modle; did you mean model?"),  # not mode, which is as near
        ("algorithm: {optimizer: {learning_rate: 1}}", "optimizer.learning_rate; did you mean algorithm.optimizer.lr?"),
        ("lr: 1", "unknown key lr; did you mean algorithm.optimizer.lr?"),
        ("batch_size: 1", "did you mean buffer.batch_size?"),
        ("buffer: {eval_tasksets: [{path: x, splt: y}]}", "did you mean buffer.explorer_input.eval_tasksets[0].split?"),
        (INPUT.replace("?", "path: x, judge: [{judge: a, wait: 1}]"), "taskset.judge[0].wait; did you mean"),
        ("explorer: {rollout_model: {enable_prefix_cachin: true}}", "explorer.rollout_model.enable_prefix_caching?"),
        ("qwertyuiop: 1", "unknown key qwertyuiop"),
        ("buffer: {batch_size: many}", "buffer.batch_size: got 'many'; input should be a valid integer"),
        ("buffer: {batch_size: 0}", "buffer.batch_size: got 0; input should be greater than 0"),
        ("buffer: {batch_size: true}", "buffer.batch_size: got True; input should be a number, not true or false"),
        ("algorithm: {optimizer: {lr: false}}", "optimizer.lr: got False; input should be a number, not true or false"),
        ("algorithm: {optimizer: {betas: [true, 0.9]}}", "betas: got [True, 0.9]; input should be a number, not true"),
        ("mode: bth", "mode: got 'bth'; input should be 'both', 'explore'"),
        ("explorer: 3", "explorer: got 3; expected a section"),
        (INPUT.replace("?", "name: x"), "buffer.explorer_input.taskset.path is missing"),
        (INPUT.replace("?", "path: x, judge: 3"), "taskset.judge: got 3"),
        ("algorithm: {optimizer: {betas: [0.9, 1.5]}}", "optimizer.betas[1]: got 1.5; input should be less than 1"),
        ("algorithm: {optimizer: {lr: .nan}}", "algorithm.optimizer.lr: got nan"),
        (INPUT.replace("?", "path: x, judge: a:b, judge_args: {by: {1: 0.5}}"),
         "taskset.judge_args: got {'by': {1: 0.5}}; by.1: the key 1 is not text, as JSON needs it: write '1' with"),
        (INPUT.replace("?", "path: x, judge: [{judge: a, args: {since: [2026-01-31]}}]"),
         "taskset.judge[0].args: got {'since': [datetime.date(2026, 1, 31)]}; since[0]: 2026-01-31 is a date, and"),
        ("explorer: {workers: {resources: {gpu: 1, browser: -1}}}", "explorer.workers.resources.browser: got -1"),
        ("explorer: {workers: {runtime_env: {env_vars: {PORT: 8000}}}}", "env_vars.PORT: got 8000; input should be"),
        ("algorithm: {policy_loss_fn_args: {clip_high: .inf}}", "clip_high: inf is not a number of JSON: give a finit"),
    ],
)  # fmt: skip
def test_a_fault_is_one_clear_line(tmp_path: Path, text: str, expected: str) -> None:
    message = fault(tmp_path, text)
    assert expected in message
    assert "\n" not in message
    assert message.startswith(str(tmp_path / "rft.yaml"))


def test_every_fault_is_reported(tmp_path: Path) -> None:
    assert len(fault(tmp_path, "mode: x\nbuffer: {batch_size: y}\nmodel: {tempo: 1}").splitlines()) == 3


def test_yaml_faults_name_the_line(tmp_path: Path) -> None:
    assert "rft.yaml, line 3, column 7: not valid YAML" in fault(tmp_path, "model:\n  model_path: [a\nbuffer: 3\n")
    assert "line 3" in fault(tmp_path, "seed: 1\nmode: both\nseed: 2\n")
    assert "occurs twice" in fault(tmp_path, "model:\n  top_p: 1\n  top_p: 0.5\n")
    assert "expected sections" in fault(tmp_path, "- a\n- b\n")
    with pytest.raises(UserError, match="no such configuration file"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"model: \xff\xfe")
    with pytest.raises(UserError, match="UTF-8"):
        load_config(tmp_path / "binary.yaml")


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_text(tmp_path, "") == RftConfig()


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    config = load_text(
        tmp_path,
        """
        model: {model_path: models/tiny}
        buffer:
          explorer_input:
            taskset: {path: data/train.jsonl}
            eval_tasksets: [{path: openai/gsm8k}, {path: ../other}]
          trainer_input: {experience_buffer: {path: 'sqlite:///x.db'}}
        """,
    )
    inputs = config.buffer.explorer_input
    assert config.model.model_path == str(tmp_path / "models" / "tiny")
    assert inputs.taskset is not None and inputs.taskset.path == str(tmp_path / "data" / "train.jsonl")
    assert [taskset.path for taskset in inputs.eval_tasksets] == ["openai/gsm8k", str(tmp_path.parent / "other")]
    assert config.buffer.trainer_input.experience_buffer.path == "sqlite:///x.db"
    assert load_text(tmp_path, "model: {model_path: models:/m@champion}").model.model_path == "models:/m@champion"


@pytest.mark.parametrize("name", ["rft.yaml", "gsm8k.yaml"])
def test_a_dump_loads_back_equal(tmp_path: Path, name: str) -> None:
    config = load_config(EXAMPLES / name)
    again = load_text(tmp_path, dump_config(config))
    assert again == config
    assert config_digest(again) == config_digest(config)


@pytest.mark.slow
@given(
    lr=st.floats(1e-12, 1.0),
    batch=st.integers(1, 10**6),
    prompt=st.text(max_size=40),
    interval=st.integers(1, 50),
    monitors=st.lists(st.sampled_from(["mlflow", "tensorboard", "wandb", "swanlab"]), max_size=3),
)
def test_any_dump_loads_back_equal(lr: float, batch: int, prompt: str, interval: int, monitors: list[str]) -> None:
    config = build_config(
        {
            "algorithm": {"optimizer": {"lr": lr, "betas": [0.9, 0.95]}},
            "buffer": {
                "batch_size": batch,
                "explorer_input": {"taskset": {"path": "a/b", "format": {"system_prompt": prompt}}},
            },
            "explorer": {"eval_interval": interval},
            "monitor": {"monitor_type": monitors},
            "warm_start": {"path": "x", "stop_at": 0.4},
        }
    )
    assert build_config(yaml.safe_load(dump_config(config))) == config


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "rft.yaml"
    file.write_text(
        "project: '1e5'\nname: 1e5th\nalgorithm: {advantage_fn_args: {eps: 1e-6, low: -2E+3, text: '3e-4'}}\n"
    )
    config = load_config(file)
    assert config.algorithm.advantage_fn_args == {"eps": 1e-6, "low": -2000.0, "text": "3e-4"}
    assert (config.project, config.name) == ("1e5", "1e5th")
    file.write_text(dump_config(config))
    assert load_config(file) == config


def test_the_digest_is_of_the_content() -> None:
    plain, spelt = build_config({}), build_config({"seed": 42, "model": {"top_p": 1}})
    assert config_digest(plain) == config_digest(spelt)
    assert config_digest(plain) != config_digest(build_config({"seed": 43}))


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RftConfig().buffer.batch_size = 3


@pytest.mark.parametrize("section", ["engine", "trainer"])
def test_a_heartbeat_limit_that_no_process_can_keep_is_refused(section: str) -> None:
    assert getattr(build_config({}), section).heartbeat_timeout_s == 120
    with pytest.raises(UserError, match=rf"{section}\.heartbeat_timeout_s"):
        build_config({section: {"heartbeat_timeout_s": 5}})
