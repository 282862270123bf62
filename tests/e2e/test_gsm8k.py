"""A round on real GSM8K rows: an untrained model earns nothing, and that is a recorded no-op with a warning."""

import dagster as dg
import pytest

from rft_platform.config.home import Home
from rft_platform.jobs.instance import open_instance

pytestmark = pytest.mark.slow


def test_one_round_on_gsm8k_ends_as_a_recorded_no_op(make_project, test_data, tiny_model):
    data = str(test_data / "data" / "gsm8k")
    tasks = {"path": data, "split": "train", "judge": "gsm8k", "limit": 64}
    project = make_project(
        "gsm8k",
        model={"model_path": str(tiny_model), "max_model_len": 2048, "max_response_tokens": 16},
        buffer={
            "batch_size": 4,
            "total_steps": 1,
            "explorer_input": {"taskset": tasks, "eval_tasksets": [{**tasks, "split": "test", "limit": 8}]},
        },
    )
    project.rft("run", "--config", str(project.config))
    trained = project.note(1, "train")
    assert trained["steps"] == 0
    assert project.note(1, "policy")["policy_version"] == 0
    assert project.note(1, "judge")["mean_reward"] == 0
    with open_instance(Home(project.home)) as instance:
        checks = {
            key.name: record.event.asset_check_evaluation
            for asset in ("judged_experiences", "policy_checkpoint")
            for key, record in _latest_checks(instance, asset).items()
        }
    for name in ("rewards_differ", "weights_changed"):
        assert not checks[name].passed
        assert checks[name].severity is dg.AssetCheckSeverity.WARN
    assert checks["rows_are_sound"].passed


def _latest_checks(instance, asset):
    names = {
        "judged_experiences": ["rows_are_sound", "groups_are_complete", "rewards_differ"],
        "policy_checkpoint": ["weights_changed"],
    }[asset]
    keys = [dg.AssetCheckKey(dg.AssetKey(asset), name) for name in names]
    return instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
