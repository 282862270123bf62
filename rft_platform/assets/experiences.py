"""Assets of a round's experiences.

Exploration stores the policy's rollouts on the round's tasks, one row per model call. The judgement adds reward and
advantage of every row, and can be repeated with another judge on stored rollouts.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from rft_platform.assets.checks import EXPERIENCE_CHECKS, experience_results
from rft_platform.assets.common import ENGINE_POOL, ProjectAsset, columns_of, numbers, path, round_of, rounded
from rft_platform.assets.run_failure import reports_faults
from rft_platform.resources.project import EngineResource, ProjectResource

if TYPE_CHECKING:
    from rft_platform.experience.store import ExperienceStore
    from rft_platform.judging.execution.experience_pipeline import OperatorReport


@partial(
    ProjectAsset,
    group_name="rollouts",
    kinds={"parquet", "vllm"},
    deps=["policy_snapshot", "task_dataset"],
    pool=ENGINE_POOL,
)
@reports_faults
def rollout_batches(
    context: dg.AssetExecutionContext, project: ProjectResource, engine: EngineResource
) -> dg.MaterializeResult:
    """Runs of the workflow on this round's tasks: token ids, rollout log-probs, messages. Written once."""
    from rft_platform.experience.schema import DESCRIPTIONS, ROLLOUT_SCHEMA
    from rft_platform.rounds.project.record import all_figures
    from rft_platform.rounds.round import Round

    opened, number = project.open(), round_of(context)
    explored = Round(opened, number).explore(partial(engine.connect, opened))
    return dg.MaterializeResult(
        metadata={
            "dagster/partition_row_count": explored.rows,
            "dagster/column_schema": columns_of(ROLLOUT_SCHEMA, DESCRIPTIONS),
            "folder": path(opened.store.rollout_files(number)[0].parent),
            **numbers(all_figures(explored)),
            **numbers(explored.task_selection.statistics if explored.task_selection else {}),
        },
        data_version=dg.DataVersion(opened.store.rollouts_digest(number)),
    )


class JudgeConfig(dg.Config):
    """The judge of this run."""

    judge: str = Field(
        default="",
        description="Built-in judge or package.module:function. Empty: the judge of the project's configuration.",
    )
    judge_args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of that judge.")
    judges: list[dict[str, Any]] = Field(
        default_factory=list, description="A weighted sum instead of one judge: a list of {judge, weight, args}."
    )
    restore: str = Field(
        default="", description="Do not judge; put the stored judgement of this judge version in force again."
    )


@partial(
    ProjectAsset,
    group_name="experiences",
    kinds={"parquet", "duckdb"},
    deps=["rollout_batches", "online_experiences"],
    check_specs=EXPERIENCE_CHECKS,
)
@reports_faults
def judged_experiences(
    context: dg.AssetExecutionContext, config: JudgeConfig, project: ProjectResource
) -> dg.MaterializeResult:
    """Rewards, their parts, advantages and the judge's version, joined to the rollouts by row_id."""
    from rft_platform.experience.schema import DESCRIPTIONS, JUDGED_SCHEMA
    from rft_platform.rounds.judge import may_be_shown, quality, restore, sample_transcripts
    from rft_platform.rounds.project.record import all_figures
    from rft_platform.rounds.reporting.reward_audit import audit_round
    from rft_platform.rounds.round import Round
    from rft_platform.rounds.setup.taskset_binding import other_judge

    opened, number = project.open(), round_of(context)
    other = other_judge(config.judge, config.judge_args, config.judges)
    judged = restore(opened, number, config.restore) if config.restore else Round(opened, number).judge(other)
    # Dagster's event log cannot be erased: text of production traffic stays out of it.
    transcripts = (
        {"transcripts": dg.MetadataValue.md(sample_transcripts(opened, number))} if may_be_shown(opened) else {}
    )
    return dg.MaterializeResult(
        metadata={
            "dagster/partition_row_count": judged.rows,
            "dagster/column_schema": columns_of(JUDGED_SCHEMA, DESCRIPTIONS),
            "folder": path(opened.store.round_folder(number) / "judged"),
            "judge_version": judged.judge_version,
            "judge_versions": _judgements(opened.store, number),
            "operators": _operators(judged.operators),
            **transcripts,
            **numbers(all_figures(judged)),
        },
        data_version=dg.DataVersion(judgement_version(opened.store, number, judged.judge_version)),
        check_results=experience_results(
            *quality(opened, number, judged.judge_version), audit_round(opened.store, number)
        ),
    )


def judgement_version(store: "ExperienceStore", number: int, judge_version: str) -> str:
    """The data version of a round's judgement: of the rows, and of the judge."""
    return f"{store.digest(number)[:16]}+{judge_version}"


def _operators(reports: "Sequence[OperatorReport]") -> dg.TableMetadataValue:
    """A table of what each operator of the experience pipeline kept, and the operator's own numbers."""
    facts = [", ".join(f"{name} {value:g}" for name, value in report.facts.items()) for report in reports]
    records = [dg.TableRecord({**asdict(report), "facts": text}) for report, text in zip(reports, facts, strict=True)]
    return dg.MetadataValue.table(records, schema=_OPERATORS)


_OPERATORS = dg.TableSchema(
    columns=[
        dg.TableColumn("name"),
        *(dg.TableColumn(f"{what}_{way}", "int") for what in ("rows", "runs", "groups") for way in ("in", "out")),
        dg.TableColumn("facts"),
    ]
)


def _judgements(store: "ExperienceStore", number: int) -> dg.TableMetadataValue:
    """A table of every stored judgement of the round; the one that training uses is marked as in_force."""
    in_force = store.judge_version(number)
    return dg.MetadataValue.table(
        [
            dg.TableRecord(
                {
                    "judge_version": version,
                    "in_force": version == in_force,
                    "rows": store.count_judged(number, version),
                    "mean_reward": rounded(_mean_reward(store, number, version)),
                }
            )
            for version in store.judge_versions(number)
        ]
    )


def _mean_reward(store: "ExperienceStore", number: int, version: str) -> float:
    """Mean over all judged rows, including those that a filter keeps from training."""
    judged = store.read_judged(number, version, columns=["reward"])
    rewards = [reward for reward in judged["reward"].to_pylist() if reward is not None]
    return sum(rewards) / len(rewards) if rewards else 0.0
