"""Which settings a started project may change."""

from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.allowed_changes import FREE, check_unchanged
from rft_platform.config.foreign.treatments import value_at
from rft_platform.config.load import build_config
from rft_platform.config.schema.buffer import MODEL_JUDGES
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.judging.execution import compose
from rft_platform.tuner.translation import merged, nested

TASKSET = "buffer.explorer_input.taskset"
CRITIC = {"name": "critic", "base_url": "https://a/v1", "model": "big"}
SERVED = {"name": "served", "model_path": "owner/model"}
LLM = {"model": "critic", "criteria": {"tone": "friendly"}, "budget": {"project_calls": 5}}
STARTED: dict[str, Any] = {
    "model": {"model_path": "base"},
    "explorer": {"auxiliary_models": [CRITIC, SERVED]},
    "buffer": {"explorer_input": {"taskset": {"path": "tasks.jsonl", "judge": "llm", "judge_args": LLM}}},
}


def check(changes: dict[str, Any], started: dict[str, Any] = STARTED) -> None:
    changed = merged(started, nested(changes))
    check_unchanged(build_config(started), build_config(changed))


def auxiliaries(**changes: Any) -> dict[str, Any]:
    return {"explorer.auxiliary_models": [{**CRITIC, **changes}, SERVED]}


@pytest.mark.parametrize(
    "changes",
    [
        {f"{TASKSET}.judge_args.budget": {"project_calls": 50, "tokens": 9}},
        {f"{TASKSET}.judge_args.budget": None},
        {f"{TASKSET}.judge_args.retries": 9, f"{TASKSET}.judge_args.timeout_s": 5.0},
        {f"{TASKSET}.judge_timeout_s": 5.0},
        auxiliaries(base_url="https://b/v1", api_key_env="KEY", timeout_s=5.0, max_concurrency=2),
        {"explorer.auxiliary_models": [CRITIC, {**SERVED, "engine_num": 2, "tensor_parallel_size": 2}]},
        {"explorer.dynamic_timeout": {"enable": True, "ratio": 2.0}, "explorer.workers": {"kind": "process"}},
        {"explorer.over_rollout.wait_after_min": 5.0, "explorer.rollout_model.tensor_parallel_size": 2},
        {"explorer.rollout_model.enable_sleep_mode": True},
        {"trainer.max_token_len_per_gpu": 512, "trainer.threads": 2, "engine.python": "/vllm/bin/python"},
    ],
)
def test_patience_places_and_memory_may_change(changes: dict[str, Any]) -> None:
    check(changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({f"{TASKSET}.judge_args.temperature": 0.5}, f"{TASKSET}.judge_args.temperature: was None, is 0.5"),
        ({f"{TASKSET}.judge_args.criteria.tone": "curt"}, f"{TASKSET}.judge_args.criteria.tone: was 'friendly'"),
        (auxiliaries(model="other"), "explorer.auxiliary_models[0].model: was 'big', is 'other'"),
        (auxiliaries(temperature=0.5), "explorer.auxiliary_models[0].temperature: was None"),
        ({"explorer.auxiliary_models": [CRITIC]}, "explorer.auxiliary_models[1].model_path: was 'owner/model'"),
        ({"explorer.over_rollout.ratio": 0.5}, "explorer.over_rollout.ratio: was 0.0"),
        ({"explorer.rollout_model.dtype": "float32"}, "explorer.rollout_model.dtype"),
        ({f"{TASKSET}.reward_fn_args": {"scale": 2}}, f"{TASKSET}.reward_fn_args"),
    ],
)
def test_settings_that_change_results_of_rounds_may_not_change(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        check(changes)
    assert named in str(caught.value)


def test_only_model_judges_may_change_their_patience() -> None:
    assert set(MODEL_JUDGES) == set(compose.MODEL_JUDGES)
    parts = [
        {"judge": "llm", "args": {"model": "critic", "criteria": {"a": "b"}}},
        {"judge": "my.code:f", "args": {"budget": 1}},
    ]
    started = merged(STARTED, nested({TASKSET: {"judge": parts, "judge_args": None}}))
    del started["buffer"]["explorer_input"]["taskset"]["judge_args"]
    patient = [{**parts[0], "args": {**parts[0]["args"], "retries": 1}}, parts[1]]  # type: ignore[dict-item]
    check({f"{TASKSET}.judge": patient}, started)
    with pytest.raises(UserError, match=r"judge\[1\]\.args\.budget: was 1, is 2"):
        check({f"{TASKSET}.judge": [parts[0], {**parts[1], "args": {"budget": 2}}]}, started)


def test_the_list_of_changeable_keys_has_only_existing_keys() -> None:
    served = {**SERVED, "base_url": None}
    known = build_config(merged(STARTED, {"explorer": {"auxiliary_models": [served]}})).model_dump(mode="json")
    known["explorer"]["auxiliary_models[]"] = known["explorer"]["auxiliary_models"][0]
    inputs = known["buffer"]["explorer_input"]
    inputs["tasksets[]"] = inputs["taskset"]  # equal keys
    for key in FREE:
        parent, _, last = key.rpartition(".")
        assert last in (value_at(known, parent) if parent else RftConfig.model_fields), key
