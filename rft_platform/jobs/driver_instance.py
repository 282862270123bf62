"""Dagster's instance in a process that executes runs itself: `rft run`, `rft judge`, `tune()`."""

from typing import Any

import dagster as dg
from dagster._core.definitions.repository_definition import SINGLETON_REPOSITORY_NAME
from dagster._core.remote_origin import (
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from rft_platform.jobs.masked_instance import MaskedInstance

CODE_LOCATION, MODULE = "rft_platform", "rft_platform.definitions"  # as in workspace.yaml


class DriverInstance(MaskedInstance):
    """Adds the origin of its job to every run created here.

    ``execute_in_process`` omits the origin. Dagster's interface then shows the run neither in the timeline nor on the
    page of its job, and cannot re-execute it.
    """

    def create_run_for_job(self, job_def: dg.JobDefinition, *arguments: Any, **options: Any) -> dg.DagsterRun:
        """Create the run with its origin."""
        return super().create_run_for_job(
            job_def, *arguments, **{"remote_job_origin": job_origin(job_def.name), **options}
        )


def job_origin(job: str) -> RemoteJobOrigin:
    """The origin by which webserver and daemon find the job of this name."""
    location = ManagedGrpcPythonEnvCodeLocationOrigin(LoadableTargetOrigin(module_name=MODULE), CODE_LOCATION)
    return RemoteRepositoryOrigin(location, SINGLETON_REPOSITORY_NAME).get_job_origin(job)
