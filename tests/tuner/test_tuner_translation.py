"""Every argument of ``tune()`` reaches the configuration."""

from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.tuner import AlgorithmConfig, DatasetConfig, TunerModelConfig
from rft_platform.tuner.result import ExperimentPaths
from rft_platform.tuner.translation import TuneArguments, TunedFunctions
from rft_platform.tuner.translation import translate as translate_arguments

FUNCTIONS = TunedFunctions("my.agent:solve", "my.agent:judge")
MODEL = TunerModelConfig(model_path="owner/model", max_model_len=16384)
TRAIN = DatasetConfig(path="owner/tasks")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def translate(functions: TunedFunctions = FUNCTIONS, **given: Any) -> tuple[RftConfig, ExperimentPaths]:
    return translate_arguments(TuneArguments(**{"model": MODEL, "train_dataset": TRAIN, **given}), functions)


def test_defaults_are_those_of_the_api(tmp_path: Path) -> None:
    config, paths = translate()
    taskset = config.buffer.explorer_input.taskset
    assert taskset is not None
    assert (taskset.workflow, taskset.judge) == ("my.agent:solve", "my.agent:judge")
    assert (taskset.format.prompt_key, taskset.format.response_key) == (None, None)
    assert (config.algorithm.algorithm_type, config.algorithm.optimizer.lr) == ("multi_step_grpo", 1e-6)
    assert (config.algorithm.repeat_times, config.buffer.batch_size) == (8, 32)
    assert (config.buffer.total_epochs, config.buffer.total_steps) == (1, None)
    assert (config.evaluation.every, config.trainer.keep_every) == (100, 100)
    assert config.buffer.train_batch_size == "round", "a round is one step, however many calls its runs make"
    assert config.explorer.eval_on_startup
    assert config.model.max_response_tokens == 8192
    assert paths.folder.parent == tmp_path / "checkpoints" / "AgentScope"
    assert paths.experiment.startswith("Experiment-") and len(paths.experiment) == len("Experiment-20260104185355")
    assert paths.home.root == paths.folder / ".rft"
    assert config.monitor.tensorboard_dir == str(paths.folder / "monitor" / "tensorboard")


def test_every_field_of_the_model_takes_effect() -> None:
    model = TunerModelConfig(
        model_path="owner/other", max_model_len=512, temperature=0.7, top_p=0.9, max_tokens=64, enable_thinking=False,
        tensor_parallel_size=2, inference_engine_num=3, tool_call_parser="llama3_json", reasoning_parser="qwen3",
    )  # fmt: skip
    config, _ = translate(model=model)
    assert (config.model.model_path, config.model.max_model_len) == ("owner/other", 512)
    assert (config.model.temperature, config.model.top_p, config.model.max_response_tokens) == (0.7, 0.9, 64)
    serving = config.explorer.rollout_model
    assert (serving.enable_thinking, serving.tensor_parallel_size, serving.engine_num) == (False, 2, 3)
    assert (serving.tool_call_parser, serving.reasoning_parser) == ("llama3_json", "qwen3")


def test_every_field_of_the_algorithm_takes_effect() -> None:
    algorithm = AlgorithmConfig(
        algorithm_type="rloo", learning_rate=3e-5, group_size=4, batch_size=16, save_interval_steps=5,
        eval_interval_steps=7,
    )  # fmt: skip
    config, _ = translate(algorithm=algorithm)
    assert (config.algorithm.algorithm_type, config.algorithm.optimizer.lr) == ("rloo", 3e-5)
    assert (config.algorithm.repeat_times, config.buffer.batch_size) == (4, 16)
    assert (config.trainer.keep_every, config.evaluation.every) == (5, 7)


def test_both_datasets_take_effect() -> None:
    train = DatasetConfig(path="owner/a", name="main", split="train[:50]", total_epochs=3, total_steps=9)
    config, _ = translate(train_dataset=train, eval_dataset=DatasetConfig(path="owner/b", split="test"))
    taskset, (held_out,) = config.buffer.explorer_input.taskset, config.buffer.explorer_input.eval_tasksets
    assert taskset is not None
    assert (taskset.path, taskset.subset_name, taskset.split) == ("owner/a", "main", "train[:50]")
    assert (config.buffer.total_epochs, config.buffer.total_steps) == (3, 9)
    assert (held_out.path, held_out.split) == ("owner/b", "test")
    assert (held_out.workflow, held_out.judge, held_out.format.prompt_key) == ("my.agent:solve", "my.agent:judge", None)


def test_auxiliary_models_are_served_with_all_their_fields() -> None:
    helper = TunerModelConfig(model_path="owner/judge", max_model_len=2048, temperature=0.2, inference_engine_num=2)
    config, _ = translate(auxiliary_models={"judge": helper})
    (model,) = config.explorer.auxiliary_models
    assert (model.name, model.model_path, model.max_model_len) == ("judge", "owner/judge", 2048)
    assert (model.temperature, model.engine_num, model.max_response_tokens) == (0.2, 2, 2047)


def test_names_and_monitor_take_effect(tmp_path: Path) -> None:
    config, paths = translate(project_name="maths", experiment_name="first", monitor_type="mlflow")
    assert (config.project, config.name, config.monitor.monitor_type) == ("maths", "first", ("mlflow",))
    assert paths.folder == tmp_path / "checkpoints" / "maths" / "first"
    with pytest.raises(UserError, match="experiment_name 'a/b' is not a valid name of a folder"):
        translate(experiment_name="a/b")


def test_an_object_store_is_no_place_for_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("checkpoint_root_dir: s3://bucket/checkpoints")
    with pytest.raises(UserError, match=r"checkpoint_root_dir s3://bucket/checkpoints: .* give its path"):
        translate(config_path=str(file))


def test_without_a_judge_the_workflow_rewards_itself() -> None:
    config, _ = translate(TunedFunctions("my.agent:solve", None), eval_dataset=TRAIN)
    inputs = config.buffer.explorer_input
    assert inputs.taskset is not None and inputs.taskset.judge is None and inputs.eval_tasksets[0].judge is None


def test_the_judge_of_the_file_judges_the_evaluation_too(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "buffer: {explorer_input: {taskset: {judge: numeric, judge_args: {tolerance: 0.1}, reward_fn_args: {a: 1}, "
        "format: {prompt_key: question, response_key: answer}}}}"
    )
    given = {"config_path": str(file), "eval_dataset": DatasetConfig(path="owner/b", split="test")}
    inputs = translate(TunedFunctions("my.agent:solve", None), **given)[0].buffer.explorer_input
    (held_out,) = inputs.eval_tasksets
    assert inputs.taskset is not None and (held_out.path, held_out.workflow) == ("owner/b", "my.agent:solve")
    for name in ("judge", "judge_args", "reward_fn_args", "format"):
        assert getattr(held_out, name) == getattr(inputs.taskset, name)
    assert (held_out.judge, held_out.judge_args, held_out.format.response_key) == (
        "numeric", {"tolerance": 0.1}, "answer",
    )  # fmt: skip


OWN_FUNCTIONS = """
buffer:
  explorer_input:
    taskset: {path: a, workflow: tools, workflow_args: {max_turns: 3}}
    eval_tasksets:
      - {path: b, workflow: tools, workflow_args: {max_turns: 3}, judge: numeric, judge_args: {tolerance: 0.1},
         reward_fn_args: {a: 1}}
"""


def test_the_evaluation_of_the_file_keeps_its_judge_if_the_call_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(OWN_FUNCTIONS)
    inputs = translate(TunedFunctions("my.agent:solve", None), config_path="config.yaml")[0].buffer.explorer_input
    (held_out,) = inputs.eval_tasksets
    assert inputs.taskset is not None and inputs.taskset.judge is None
    assert (held_out.judge, held_out.judge_args, held_out.reward_fn_args) == ("numeric", {"tolerance": 0.1}, {"a": 1})


def test_arguments_of_the_files_functions_are_not_those_of_the_calls_functions(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(OWN_FUNCTIONS)
    for functions in (FUNCTIONS, TunedFunctions("my.agent:solve", None)):
        inputs = translate(functions, config_path="config.yaml")[0].buffer.explorer_input
        (held_out,) = inputs.eval_tasksets
        assert inputs.taskset is not None
        assert (inputs.taskset.workflow, inputs.taskset.workflow_args) == ("my.agent:solve", {})
        assert (held_out.workflow, held_out.workflow_args) == ("my.agent:solve", {})
    (held_out,) = translate(FUNCTIONS, config_path="config.yaml")[0].buffer.explorer_input.eval_tasksets
    assert (held_out.judge, held_out.judge_args, held_out.reward_fn_args) == ("my.agent:judge", {}, {})


def test_limits_fit_the_context(tiny_model: Path) -> None:
    small = TunerModelConfig(model_path=str(tiny_model), max_model_len=64)
    assert translate(model=small)[0].model.max_response_tokens == 63
    wide = TunerModelConfig(model_path="owner/model", max_model_len=40000)
    assert translate(model=wide)[0].trainer.max_token_len_per_gpu == 40000


def test_the_tokenizer_decides_on_the_default_parser_of_thoughts(tmp_path: Path) -> None:
    def parser(**given: Any) -> str | None:
        return translate(**given)[0].explorer.rollout_model.reasoning_parser

    asked = TunerModelConfig(model_path="owner/model", max_model_len=64, reasoning_parser="deepseek_r1")
    for path in ("owner/model", "models:/maths@champion", str(tmp_path)):
        assert parser(model=TunerModelConfig(model_path=path, max_model_len=64)) == "auto"
    assert parser(model=asked) == "deepseek_r1"
    config, _ = translate(auxiliary_models={"plain": MODEL, "asked": asked})
    assert [model.reasoning_parser for model in config.explorer.auxiliary_models] == ["auto", "deepseek_r1"]
    (tmp_path / "config.yaml").write_text("explorer: {rollout_model: {reasoning_parser: qwen3}}")
    assert parser(config_path="config.yaml") == "qwen3"


YAML = """
project: from-file
seed: 7
model: {model_path: owner/file, max_model_len: 100, temperature: 0.5}
algorithm: {algorithm_type: rloo, optimizer: {lr: 1e-5}}
buffer:
  batch_size: 4
  total_steps: 3
  explorer_input:
    taskset:
      path: owner/file-tasks
      format: {prompt_key: question}
      rollout_args: {n: 2}
      default_workflow_type: other
    eval_tasksets: [{path: owner/held-out, split: test}]
explorer: {eval_interval: 2}
"""


def test_values_that_arguments_leave_open_come_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(YAML)
    config, paths = translate(model=None, train_dataset=None, config_path="config.yaml")
    taskset, (held_out,) = config.buffer.explorer_input.taskset, config.buffer.explorer_input.eval_tasksets
    assert taskset is not None
    assert (config.seed, config.model.model_path, config.model.temperature) == (7, "owner/file", 0.5)
    assert (config.algorithm.algorithm_type, config.algorithm.optimizer.lr) == ("rloo", 1e-5)
    assert (config.buffer.batch_size, config.buffer.total_steps, config.algorithm.repeat_times) == (4, 3, 2)
    assert (taskset.path, taskset.format.prompt_key, taskset.workflow) == (
        "owner/file-tasks", "question", "my.agent:solve",
    )  # fmt: skip
    assert (held_out.path, held_out.workflow, held_out.judge) == ("owner/held-out", "my.agent:solve", "my.agent:judge")
    assert (config.evaluation.every, paths.project) == (2, "from-file")


def test_a_file_with_variables_writes_to_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(
        "checkpoint_root_dir: ${oc.env:SOME_ROOT,./saved}\nmodel: {model_path: '${oc.env:SOME_MODEL}'}\n"
    )
    monkeypatch.delenv("SOME_ROOT", raising=False)
    monkeypatch.setenv("SOME_MODEL", "owner/set")
    config, paths = translate(model=None, config_path="config.yaml", experiment_name="one")
    assert (paths.root, config.checkpoint_root_dir) == (tmp_path / "saved", str(tmp_path / "saved"))
    assert config.model.model_path == "owner/set"
    monkeypatch.setenv("SOME_ROOT", str(tmp_path / "elsewhere"))
    assert translate(config_path="config.yaml")[1].root == tmp_path / "elsewhere"


def test_arguments_override_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(YAML)
    config, paths = translate(
        config_path="config.yaml",
        model=TunerModelConfig(model_path="owner/mine", max_model_len=200),
        train_dataset=DatasetConfig(path="owner/mine", total_steps=9),
        algorithm=AlgorithmConfig(group_size=5, eval_interval_steps=6),
        project_name="mine",
    )
    assert (config.model.model_path, config.model.max_model_len, config.buffer.total_steps) == ("owner/mine", 200, 9)
    assert (config.algorithm.repeat_times, config.evaluation.every, paths.project) == (5, 6, "mine")
    # what the arguments leave at its default stays as the file has it
    assert (config.model.temperature, config.algorithm.algorithm_type, config.buffer.batch_size) == (0.5, "rloo", 4)


@pytest.mark.parametrize(
    ("missing", "said"),
    [("model", "there is no model; give model=TunerModelConfig"), ("train_dataset", "there are no tasks; give train_")],
)
def test_missing_required_arguments_are_named(missing: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        translate(**{missing: None})


def test_a_file_of_another_mode_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mode: train\n")
    with pytest.raises(UserError, match="tune\\(\\) does not support mode 'train'; set mode to 'both'"):
        translate(config_path="config.yaml")


def test_what_is_written_out_as_none_overrides_the_file_too(tmp_path: Path) -> None:
    serving = "explorer: {rollout_model: {reasoning_parser: qwen3, enable_thinking: true}}\n"
    (tmp_path / "config.yaml").write_text(YAML.replace("explorer: {eval_interval: 2}\n", serving))
    said = TunerModelConfig(model_path="owner/m", max_model_len=200, reasoning_parser=None, enable_thinking=None)
    train = DatasetConfig(path="owner/mine", split=None, name=None)
    config, _ = translate(config_path="config.yaml", model=said, train_dataset=train)
    assert config.explorer.rollout_model.reasoning_parser is config.explorer.rollout_model.enable_thinking is None
    assert config.buffer.explorer_input.taskset is not None
    assert config.buffer.explorer_input.taskset.split == "train"
    assert config.buffer.total_steps == 3  # what is not written out stays as the file has it
    left = translate(config_path="config.yaml", model=MODEL)[0].explorer.rollout_model
    assert (left.reasoning_parser, left.enable_thinking) == ("qwen3", True)


def test_epochs_that_are_written_out_end_the_run_whatever_steps_the_file_has(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(YAML)

    def length(**fields: Any) -> tuple[int, int | None]:
        train = DatasetConfig(path="owner/mine", **fields)
        buffer = translate(config_path="config.yaml", train_dataset=train)[0].buffer
        return buffer.total_epochs, buffer.total_steps

    assert length(total_epochs=4) == (4, None)
    assert length(total_epochs=4, total_steps=9) == (4, 9)
    assert length(total_steps=None) == (1, None)
    assert length() == (1, 3)


def test_total_steps_of_an_evaluation_has_no_effect_and_is_reported() -> None:
    held_out = DatasetConfig(path="owner/b", split="test", total_steps=5)
    notice = TuneArguments(eval_dataset=held_out).notice
    assert notice == "eval_dataset: total_steps changes nothing: an evaluation runs every task"
    assert TuneArguments(train_dataset=held_out, eval_dataset=DatasetConfig(path="owner/b")).notice is None


def test_a_setting_that_is_assigned_counts_as_written_out(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(YAML)
    algorithm = AlgorithmConfig()
    algorithm.batch_size = 32  # its default
    assert translate(config_path="config.yaml", algorithm=algorithm)[0].buffer.batch_size == 32
