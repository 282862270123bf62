"""OpenLineage events of a round's stages, with the files that a stage read and wrote as datasets.

The client of OpenLineage finds its transport in its own configuration: ``openlineage.yml``, or variables such as
``OPENLINEAGE_URL``. Datasets have the namespace ``file`` and their path as name.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.fault_classification import described
from rft_platform.model_registry.manifests import read_manifest
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RoundEvaluation, published, read
from rft_platform.rounds.reporting.run_log import training_dataset

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import RunState

LOG = logging.getLogger(__name__)
PRODUCER = "https://pypi.org/project/rft-platform"
_TRAININGS = ("policy_checkpoint", "sft_checkpoint", "dpo_checkpoint", "distilled_checkpoint")


@dataclass(frozen=True, slots=True)
class StageData:
    """Files or folders that a stage read or wrote; also the name of a dataset on a hub."""

    place: Path | str
    version: str | None = None  # digest of the content
    rows: int | None = None


@dataclass(slots=True)
class StageRun:
    """One run of a stage."""

    project: Project
    stage: str  # name of the asset
    round: int
    run_id: str
    client: "OpenLineageClient"
    facets: dict[str, Any]  # the Dagster run to which it belongs

    def emit(self, state: "RunState", error: BaseException | None = None) -> None:
        """Send an event. A failure is logged: the events are a copy of what the store records."""
        from openlineage.client.event_v2 import Job, Run, RunEvent
        from openlineage.client.facet_v2 import error_message_run

        config, facets = self.project.config, dict(self.facets)
        if error is not None:
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(
                message=described(error), programmingLanguage="python"
            )
        try:
            inputs, outputs = data_of(self.project, self.stage, self.round) if state.value == "COMPLETE" else ([], [])
            event = RunEvent(
                eventTime=datetime.now(UTC).isoformat(),
                producer=PRODUCER,
                run=Run(runId=self.run_id, facets=facets),
                job=Job(namespace=config.project, name=f"{config.name}.{self.stage}"),
                eventType=state,
                inputs=[_dataset(each, output=False) for each in inputs],
                outputs=[_dataset(each, output=True) for each in outputs],
            )
            self.client.emit(event)
        except Exception as failed:  # a transport may raise anything, and must not end the stage
            LOG.warning("the OpenLineage event %s of %s was not sent: %s", state.value, self.stage, described(failed))


@contextmanager
def stage_events(
    project: Project, stage: str, round_number: int, dagster_run_id: str, dagster_job: str
) -> Iterator[None]:
    """Emit START before the block and COMPLETE, FAIL or ABORT after it, if ``monitor.openlineage`` is set."""
    if not project.config.monitor.openlineage:
        yield
        return
    run = _started(project, stage, round_number, dagster_run_id, dagster_job)
    from openlineage.client.event_v2 import RunState

    run.emit(RunState.START)
    try:
        yield
    except Exception as error:
        run.emit(RunState.FAIL, error)
        raise
    except BaseException:
        run.emit(RunState.ABORT)
        raise
    else:
        run.emit(RunState.COMPLETE)
    finally:
        run.client.close(timeout=5.0)


def _started(project: Project, stage: str, round_number: int, dagster_run_id: str, dagster_job: str) -> StageRun:
    from openlineage.client import OpenLineageClient
    from openlineage.client.facet_v2 import parent_run
    from openlineage.client.uuid import generate_new_uuid

    facets: dict[str, Any] = {}
    if dagster_run_id:
        job = parent_run.Job(project.config.project, dagster_job)
        facets["parent"] = parent_run.ParentRunFacet(run=parent_run.Run(dagster_run_id), job=job)
    return StageRun(project, stage, round_number, str(generate_new_uuid()), OpenLineageClient(), facets)


def data_of(project: Project, stage: str, number: int) -> tuple[list[StageData], list[StageData]]:
    """What a complete stage of a round read and wrote."""
    if stage in _TRAININGS:
        return _of_training(project, number)
    store, buffer = project.store, project.config.buffer
    folder = store.round_folder(number)
    rollouts = StageData(folder / "rollouts", rows=store.count_rollouts(number))
    made = _policies(project, number)
    weights = [StageData(policy.folder, policy.weights_digest) for policy in made]
    if stage == "rollout_batches":
        return [_tasks(taskset.path) for taskset in buffer.explorer_input.explored.values()], [rollouts]
    if stage == "online_experiences":
        return [], [rollouts]
    if stage == "judged_experiences":
        judged = store.judged_file(number)
        rows = store.count_judged(number)
        return [rollouts], [] if judged is None else [StageData(judged, store.digest(number), rows)]
    if stage == "evaluation_report":
        tasks = [_tasks(taskset.path) for taskset in buffer.explorer_input.eval_tasksets]
        return [*weights, *tasks], [StageData(read(store, number).file(RoundEvaluation))]
    if stage in ("sft_dataset", "preference_pairs"):
        written = read(store, number).dataset
        if written is None:
            return [], []
        return [_tasks(written.source)], [StageData(Path(written.path), written.digest, written.rows)]
    return [], []


def _of_training(project: Project, number: int) -> tuple[list[StageData], list[StageData]]:
    """Rows and parents of the round's trainings, and their checkpoints."""
    inputs, outputs = [], []
    for policy in _policies(project, number):
        if not (Path(policy.folder) / "manifest.json").exists():
            continue  # nothing has been trained yet: the policy is the base model
        manifest = read_manifest(Path(policy.folder))
        rows = training_dataset(project, policy, manifest.lineage)
        inputs.append(StageData(manifest.parent_folder))
        if rows is not None:
            inputs.append(StageData(rows.source, rows.digest, rows.profile["num_rows"]))
        outputs.append(StageData(policy.folder, policy.weights_digest))
    return inputs, outputs


def _policies(project: Project, number: int) -> list[Policy]:
    found = (published(project.store, number, name) for name in project.policies)
    return [policy for policy in found if policy is not None]


def _tasks(path: str) -> StageData:
    return StageData(Path(path) if Path(path).exists() else path)


def _dataset(data: StageData, *, output: bool) -> Any:
    from openlineage.client.event_v2 import InputDataset, OutputDataset
    from openlineage.client.facet_v2 import (
        dataset_version_dataset,
        input_statistics_input_dataset,
        output_statistics_output_dataset,
    )

    local = isinstance(data.place, Path) or Path(data.place).is_absolute()
    namespace, name = ("file", str(Path(data.place).absolute())) if local else ("huggingface", str(data.place))
    facets = {}
    if data.version is not None:
        facets["version"] = dataset_version_dataset.DatasetVersionDatasetFacet(datasetVersion=data.version)
    if output:
        statistics = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(rowCount=data.rows)
        given = {} if data.rows is None else {"outputStatistics": statistics}
        return OutputDataset(namespace=namespace, name=name, facets=facets, outputFacets=given)
    read = input_statistics_input_dataset.InputStatisticsInputDatasetFacet(rowCount=data.rows)
    given = {} if data.rows is None else {"inputStatistics": read}
    return InputDataset(namespace=namespace, name=name, facets=facets, inputFacets=given)
