"""Register a round's checkpoint in MLflow: step metrics, and a model version tagged with its lineage."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.policy_names import FIRST_POLICY, stored_name
from rft_platform.rounds.project.policy import Policy, parent_of, publish, published
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.reporting.run_log import monitor_round, monitor_steps
from rft_platform.rounds.reporting.run_origin import link_version, log_training
from rft_platform.rounds.reporting.sampled_traces import log_round_traces
from rft_platform.rounds.setup.noted_versions import version_tags
from rft_platform.training.protocol import StepEvent, TrainResult

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry


def register(
    project: Project,
    registry: "ModelRegistry",
    round_number: int,
    result: TrainResult,
    steps: Sequence[StepEvent],
    origin: Mapping[str, Any],
    name: str = FIRST_POLICY,
) -> Policy:
    """Log the round's steps and register its checkpoint; returns the published policy with its model version.

    ``origin`` is the lineage of the weights (``rounds.train.lineage``); it becomes the version's tags. A no-op round
    registers nothing: its policy keeps the parent's model version. Each policy has its own model and MLflow
    run.
    """
    policy = published(project.store, round_number, name)
    assert policy is not None, "train publishes the policy"
    registry = registry.of_policy(name)
    run = registry.training_run(stored_name(project.config.name, name), {"rft.config_digest": origin["config_digest"]})
    run.reopen()
    run.log_params(project.config.model_dump(mode="json", exclude_none=True))
    if name == FIRST_POLICY:
        judged = project.store.read_note(round_number, "judge") or {}
        run.log_round(round_number, judged, prefix="round/")
        monitor_round(project, round_number, judged, prefix="round/")
        log_round_traces(project, registry, round_number)
    if result.steps == 0:
        registered = replace(policy, model_version=parent_of(project.store, round_number, name).model_version)
    else:
        model_id = log_training(project, run, policy, origin, steps)
        monitor_steps(project, round_number, steps, name)
        tags = version_tags(origin, result.weights_digest)
        version = registry.register_checkpoint(Path(policy.folder), policy.policy_version, tags, run.run_id)
        link_version(registry, run, model_id, version)
        registered = replace(policy, model_version=str(version))
    publish(project.store, registered)
    return registered
