"""Register a round's checkpoint in MLflow: step metrics, and a model version tagged with its lineage."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.common.policy_names import DEFAULT_POLICY, stored_name
from rft_platform.rounds.project.policy import parent_of, publish, required
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, Trained, all_figures, read
from rft_platform.rounds.reporting.run_log import (
    link_version,
    log_round_traces,
    log_training,
    monitor_round,
    monitor_steps,
)
from rft_platform.rounds.setup.noted_versions import version_tags

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry


def register(
    project: Project,
    registry: "ModelRegistry",
    round_number: int,
    trained: Trained,
    name: str = DEFAULT_POLICY,
) -> Policy:
    """Log the round's steps and register its checkpoint; returns the published policy with its model version.

    The lineage of the weights becomes the version's tags. A no-op round registers nothing: its policy keeps the
    parent's model version. Each policy has its own model and MLflow run.
    """
    record = read(project.store, round_number)
    policy, registry = required(project.store, round_number, name), registry.of_policy(name)
    origin, steps = trained.lineage, trained.step_events
    run = registry.training_run(stored_name(project.config.name, name), {"rft.config_digest": origin["config_digest"]})
    run.reopen()
    run.log_params(project.config.model_dump(mode="json", exclude_none=True))
    if name == DEFAULT_POLICY:
        judged = all_figures(record.judged) if record.judged else {}
        run.log_round(round_number, judged, prefix="round/")
        monitor_round(project, round_number, judged, prefix="round/")
        log_round_traces(project, registry, round_number)
    if trained.steps == 0:
        registered = replace(policy, model_version=parent_of(project.store, round_number, name).model_version)
    else:
        model_id = log_training(project, run, policy, origin, steps)
        monitor_steps(project, round_number, steps, name)
        tags = version_tags(origin, trained.weights_digest)
        version = registry.register_checkpoint(Path(policy.folder), policy.policy_version, tags, run.run_id)
        link_version(registry, run, model_id, version)
        registered = replace(policy, model_version=str(version))
    publish(project.store, registered)
    return registered
