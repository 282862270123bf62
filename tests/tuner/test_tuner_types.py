"""The public names, and how settings and signatures are refused."""

import subprocess
import sys
from dataclasses import MISSING, fields
from typing import Any

import pytest
from pydantic import ValidationError

import rft_platform.judging.types as judging
import rft_platform.rollout.workflow as workflow
import rft_platform.tuner as tuner
from rft_platform.common.errors import UserError
from rft_platform.tuner import (
    AlgorithmConfig,
    DatasetConfig,
    JudgeOutput,
    TunerModelConfig,
    WorkflowOutput,
    check_judge_function,
    check_workflow_function,
)
from rft_platform.tuner.result import StepRecord


def test_the_public_names_are_those_of_the_api() -> None:
    names = {
        "tune", "AlgorithmConfig", "WorkflowType", "WorkflowOutput", "JudgeType", "JudgeOutput", "DatasetConfig",
        "TunerModelConfig", "check_workflow_function", "check_judge_function", "TuneResult",
        "Workflow", "ModelWrapper", "Task", "Experience", "select_model",
        "PromptTuneConfig", "TinkerConfig", "tune_prompt",
    }  # fmt: skip
    assert set(tuner.__all__) == names
    assert all(hasattr(tuner, name) for name in names)


def test_importing_it_is_light() -> None:
    heavy = ["torch", "dagster", "openai", "mlflow", "pandas", "transformers", "datasets", "agentscope", "vllm"]
    program = f"import sys, rft_platform.tuner; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_defaults_are_those_of_the_api() -> None:
    model = TunerModelConfig(model_path="m", max_model_len=10)
    assert model.model_dump() == {
        "model_path": "m", "max_model_len": 10, "temperature": 1.0, "top_p": 1.0, "max_tokens": 8192,
        "enable_thinking": None, "tensor_parallel_size": 1, "inference_engine_num": 1, "tool_call_parser": "hermes",
        "reasoning_parser": "deepseek_r1",
    }  # fmt: skip
    assert AlgorithmConfig().model_dump() == {
        "algorithm_type": "multi_step_grpo", "learning_rate": 1e-6, "group_size": 8, "batch_size": 32,
        "save_interval_steps": 100, "eval_interval_steps": 100,
    }  # fmt: skip
    dataset = DatasetConfig(path="d").model_dump()
    assert dataset == {"path": "d", "name": None, "split": "train", "total_epochs": 1, "total_steps": None}
    assert WorkflowOutput().model_dump() == {"reward": None, "response": None, "metrics": None, "rewards": None}
    assert JudgeOutput(reward=1).model_dump() == {"reward": 1.0, "metrics": None, "rewards": None}


def test_positional_arguments_are_refused_by_a_message_that_names_the_fields() -> None:
    wrong: Any = DatasetConfig
    with pytest.raises(
        TypeError, match=r"DatasetConfig takes its fields by name, got \('data',\); its fields are path"
    ):
        wrong("data")


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (DatasetConfig, {"path": "d", "total_epochs": 0}, "total_epochs\n  Input should be greater than or equal to 1"),
        (TunerModelConfig, {"model_path": "m"}, "max_model_len\n  Field required"),
        (TunerModelConfig, {"model_path": "m", "max_model_len": 9, "top_p": 0.0}, "top_p\n  Input should be greater"),
        (AlgorithmConfig, {"learning_rate": float("nan")}, "learning_rate\n  Input should be"),
        (JudgeOutput, {}, "reward\n  Field required"),
        (WorkflowOutput, {"metrics": {"a": "many"}}, "metrics.a\n  Input should be a valid number"),
    ],
)
def test_faulty_fields_are_refused(kind: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind(**fields)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (AlgorithmConfig, {"group_sise": 3}, "AlgorithmConfig has no field 'group_sise': did you mean group_size? its"),
        (WorkflowOutput, {"rewrad": 1.0}, "WorkflowOutput has no field 'rewrad': did you mean reward? its"),
        (DatasetConfig, {"path": "d", "x": "y"}, "DatasetConfig has no field 'x': its fields are path"),
    ],
)
def test_an_unknown_field_is_named_in_one_line(kind: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        kind(**fields)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_dataset": "x"}, "tune: train_dataset is 'x'; expected DatasetConfig(path=...)"),
        ({"model": {"a": 1}}, "tune: model is {'a': 1}; expected TunerModelConfig(model_path=...)"),
        ({"algorithm": 3}, "tune: algorithm is 3; expected AlgorithmConfig(algorithm_type=...)"),
        (
            {"auxiliary_models": ["x"]},
            "tune: auxiliary_models is ['x']; expected a name for each model: {'judge': Tuner",
        ),
        ({"auxiliary_models": {"m": "x"}}, "tune: auxiliary_models['m'] is 'x'; expected TunerModelConfig("),
    ],
)
def test_an_argument_of_another_type_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    async def solve(task: dict[str, Any], model: Any) -> WorkflowOutput:
        return WorkflowOutput(response="")

    with pytest.raises(UserError) as caught:
        tuner.tune(workflow_func=solve, **arguments)
    assert str(caught.value).startswith(message)


def test_fields_may_be_assigned_later_and_are_checked_then() -> None:
    output, judgement, dataset = WorkflowOutput(response="x"), JudgeOutput(reward=0.0), DatasetConfig(path="d")
    output.reward, judgement.metrics, dataset.total_steps = 1, {"words": 3}, 5
    assert (output.reward, judgement.metrics, dataset.total_steps) == (1.0, {"words": 3.0}, 5)
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        dataset.total_steps = 0
    assert dataset.total_steps == 5
    with pytest.raises(ValueError, match="rewrad"):
        output.rewrad = 1.0  # type: ignore[attr-defined]


def test_outputs_have_the_same_fields_as_those_in_workers() -> None:
    for ours, theirs in ((WorkflowOutput, workflow.WorkflowOutput), (JudgeOutput, judging.JudgeOutput)):
        required = {name for name, one in ours.model_fields.items() if one.is_required()}
        assert list(ours.model_fields) == [one.name for one in fields(theirs)]
        assert required == {one.name for one in fields(theirs) if one.default is MISSING}


async def good_workflow(task, model, auxiliary_models=None, logger=None): ...  # type: ignore[no-untyped-def]
async def swapped_workflow(model, task): ...  # type: ignore[no-untyped-def]
async def variadic_workflow(task, model, *args, **kwargs): ...  # type: ignore[no-untyped-def]
async def modelless_workflow(task): ...  # type: ignore[no-untyped-def]
async def curious_workflow(task, model, temperature=1.0): ...  # type: ignore[no-untyped-def]
async def nameless_workflow(task, model, /): ...  # type: ignore[no-untyped-def]
async def good_judge(task, response, auxiliary_models): ...  # type: ignore[no-untyped-def]
async def variadic_judge(task, response, **more): ...  # type: ignore[no-untyped-def]
async def deaf_judge(task): ...  # type: ignore[no-untyped-def]
async def curious_judge(task, response, strict=True): ...  # type: ignore[no-untyped-def]


def test_parameters_are_matched_by_name() -> None:
    check_workflow_function(good_workflow)
    check_workflow_function(swapped_workflow)
    check_judge_function(good_judge)


@pytest.mark.parametrize(
    ("check", "function", "said"),
    [
        (check_workflow_function, variadic_workflow, r"Should not use \*args or \*\*kwargs"),
        (check_workflow_function, modelless_workflow, r"Missing essential parameters: \['model'\]"),
        (check_workflow_function, curious_workflow, r"Contains disallowed parameters: \['temperature'\]"),
        (
            check_workflow_function,
            nameless_workflow,
            r"Should not have positional-only parameters: \['task', 'model'\]",
        ),
        (check_judge_function, variadic_judge, r"Should not use \*args or \*\*kwargs"),
        (check_judge_function, deaf_judge, r"Missing essential parameters: \['response'\]"),
        (check_judge_function, curious_judge, r"Contains disallowed parameters: \['strict'\]"),
    ],
)
def test_wrong_signatures_are_refused(check: Any, function: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(function)


def test_the_history_is_a_table() -> None:
    import pandas

    table = pandas.DataFrame([StepRecord(0, 0), StepRecord(1, 1, 0.5, {"loss": 1.0})])
    assert table["reward"].tolist()[1:] == [0.5] and "metrics" in table
