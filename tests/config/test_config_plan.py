"""The plan: batch arithmetic and its text."""

from collections.abc import Callable
from importlib.util import find_spec

from hypothesis import given
from hypothesis import strategies as st

from rft_platform.config.checks.notices import unusual_length
from rft_platform.config.dry_run import render_plan, run_plan
from rft_platform.config.load import build_config
from rft_platform.config.resolve import RunLength, resolve
from rft_platform.config.schema.rft_config import RftConfig
from tests.support.findings import warnings_of

MakeConfig = Callable[..., RftConfig]


def test_batch_arithmetic(make_config: MakeConfig) -> None:
    run = resolve(make_config(buffer__train_batch_size=16, synchronizer__sync_interval=2))
    batches = run.batches
    assert (batches.repeat_times, batches.experiences_a_round, batches.steps_a_round) == (8, 64, 4)
    assert (run.length(), batches.exact) == (RunLength(rounds=2, steps=8), True)


def test_passes_over_a_round_multiply_its_steps(make_config: MakeConfig) -> None:
    once = resolve(make_config(buffer__train_batch_size=16, synchronizer__sync_interval=2))
    keys = {"buffer__train_batch_size": 16, "synchronizer__sync_interval": 2, "algorithm__epochs": 3}
    run = resolve(make_config(**keys))
    assert run.batches.steps_a_round == 3 * once.batches.steps_a_round == 12
    assert run.length() == RunLength(rounds=2, steps=24)
    text = render_plan(run_plan(run, gpu_count=0))
    assert "64 / 16 experiences a step x 3 passes = 12 optimiser steps a round" in text
    ended = resolve(make_config(**keys, trainer__total_steps=12))
    assert ended.length() == RunLength(rounds=1, steps=12)
    whole = resolve(make_config(buffer__train_batch_size="round", algorithm__epochs=2))
    assert whole.batches.steps_a_round == 2
    assert "2 optimiser steps a round, each with all its experiences" in render_plan(run_plan(whole, gpu_count=0))


def test_the_length_of_the_run_may_depend_on_the_tasks() -> None:
    run = resolve(build_config({"buffer": {"batch_size": 10, "total_epochs": 2}, "synchronizer": {"sync_interval": 3}}))
    assert run.length() is None
    assert run.length(task_count=95) == RunLength(rounds=7, steps=21)  # 19 batches
    fixed = resolve(build_config({"buffer": {"total_steps": 7}, "synchronizer": {"sync_interval": 3}}))
    assert fixed.length() == fixed.length(task_count=2) == RunLength(rounds=3, steps=9)


def test_total_steps_of_the_trainer_end_the_run_and_its_schedule() -> None:
    keys = {
        "buffer": {"batch_size": 4, "total_epochs": 5, "train_batch_size": 16},
        "algorithm": {"optimizer": {"lr_scheduler_type": "linear"}},
        "trainer": {"total_steps": 2},
    }
    run = resolve(build_config(keys))
    length = run.length(task_count=16)
    assert length == RunLength(rounds=1, steps=2)  # 4 tasks x 8 runs are two steps; without the key 20 rounds
    text = render_plan(run_plan(run, gpu_count=0, task_count=16))
    assert "rounds: 1, 2 optimiser steps in all" in text and not list(unusual_length(run, task_count=16))
    longer = resolve(build_config(keys | {"trainer": {"total_steps": 3}}))
    text = render_plan(run_plan(longer, gpu_count=0, task_count=16))
    assert "rounds: 2, 4 optimiser steps in all" in text
    (unusual,) = unusual_length(longer, task_count=16)
    assert unusual.text == "trainer.total_steps 3: the run has 4 optimiser steps, 2 in each of 2 rounds"
    dynamic = build_config(keys | {"synchronizer": {"sync_style": "dynamic_by_explorer"}})
    assert resolve(dynamic).length(task_count=16) == RunLength(rounds=1, steps=2)


@given(batch=st.integers(1, 64), runs=st.integers(2, 16), interval=st.integers(1, 5), size=st.integers(1, 999))
def test_steps_cover_all_experiences(batch: int, runs: int, interval: int, size: int) -> None:
    config = build_config(
        {
            "buffer": {"batch_size": batch, "train_batch_size": size},
            "algorithm": {"repeat_times": runs},
            "synchronizer": {"sync_interval": interval},
        }
    )
    plan = resolve(config).batches
    assert (plan.steps_a_round - 1) * size < plan.experiences_a_round <= plan.steps_a_round * size


def test_the_plan_lists_where_processes_run_and_what_waits(make_config: MakeConfig) -> None:
    config = make_config(
        synchronizer__sync_offset=1,
        warm_start={"path": "o/d"},
        monitor__monitor_type="wandb",
        engine__kind="transformers",
        buffer__explorer_input__eval_tasksets=[{"path": "o/held-out"}],
    )
    text = render_plan(run_plan(resolve(config), gpu_count=0))
    assert "engine     transformers engine, 1 x cpu" in text
    assert "trainer    torchrun worker group, 1 x cpu" in text
    assert "4 tasks x 8 runs x 1 batch = 32 experiences a round" in text
    assert "32 / 32 experiences a step = 1 optimiser step a round" in text
    assert "rounds: 3, 3 optimiser steps in all" in text
    assert "round k explores when round k-2 has trained: 1 round ahead of training" in text
    assert "every round, and after the last, the new policy is evaluated" in text
    assert "round 1 explores when the warm start has ended" in text
    missing = find_spec("wandb") is None
    unused = [line for line in warnings_of(config) if "wandb has no effect here: its package is not installed" in line]
    assert bool(unused) == missing


def test_the_plan_of_a_dynamic_style(make_config: MakeConfig) -> None:
    sync = {"synchronizer__sync_interval": 2, "synchronizer__max_staleness": 3}
    config = make_config(buffer__train_batch_size=48, synchronizer__sync_style="dynamic_by_explorer", **sync)
    text = render_plan(run_plan(resolve(config), gpu_count=0))
    assert "48 experiences a step, trained as soon as they are stored" in text
    assert "rounds: 3, about 2 optimiser steps in all" in text, "96 experiences; a round is one batch"
    assert "explore batches follow one another without waiting; after every 2 of them the engine loads newer" in text
    assert "rows more than 3 policy versions old are not trained" in text
    assert "a training starts as soon as the experiences of one step are stored" in text
    assert "no policy is evaluated: there are no eval_tasksets" in text and "after the last" not in text
    config = make_config(synchronizer__sync_style="dynamic_by_trainer", synchronizer__sync_interval=3)
    text = render_plan(run_plan(resolve(config), gpu_count=0))
    assert "a training starts as soon as the experiences of 3 steps are stored" in text


def test_a_trainer_service_has_no_engine(make_config: MakeConfig) -> None:
    plan = run_plan(resolve(make_config(mode="train", buffer__train_batch_size=16)), gpu_count=4)
    assert plan.sections["processes"] == ["trainer    torchrun worker group, 1 x cuda, GPU 3"]
    assert plan.sections["batches"] == []
    assert plan.sections["order"] == ["a step waits for 16 experiences"]


def test_an_offset_in_batches_becomes_rounds() -> None:
    sync = build_config({"synchronizer": {"sync_interval": 4, "sync_offset": 5}}).synchronizer
    assert sync.offset_rounds == 2


def test_the_plan_names_what_is_trained_and_how(make_config: MakeConfig) -> None:
    def training(**keys: object) -> str:
        return "\n".join(run_plan(resolve(make_config(**keys)), gpu_count=0).sections["training"])

    assert (
        "loss       ppo, token-mean" in training() and "correction bypass" in training() and "critic" not in training()
    )
    assert "weights    all, learning rate 1e-06" in training()
    ppo = training(algorithm__algorithm_type="ppo", algorithm__critic={"lr": 2e-5})
    assert "advantage  gae" in ppo and "critic     the body of the policy, learning rate 2e-05" in ppo
    adapter = training(algorithm__algorithm_type="gspo", model__lora_configs=[{"lora_rank": 8, "lora_alpha": 16}])
    assert "loss       gspo" in adapter and "correction decoupled" in adapter
    assert "a LoRA adapter of rank 8, alpha 16" in adapter
    assert training(mode="explore") == ""
