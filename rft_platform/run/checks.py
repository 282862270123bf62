"""All checks before a start, and what follows from their findings: a refusal, the dry run's plan, or ``rft doctor``."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from rft_platform.common.errors import RftError
from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.dry_run import RunPlan, run_plan
from rft_platform.config.findings import Finding, error, has_errors, note, raised, refuse
from rft_platform.config.home import Home
from rft_platform.config.load import load_config, load_config_of
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.online.project import project_in
from rft_platform.rounds.project.project import Project
from rft_platform.run import cluster_checks, data_checks, machine, project_checks
from rft_platform.run.cluster_checks import machine_of
from rft_platform.run.console import notes
from rft_platform.run.model_check import model_check

Check = Callable[[Project], Iterator[Finding]]

#: The checks that need the project's folder, its models and its services. They and ``DATA`` follow the checks of the
#: configuration and of the machine (``settings_findings``) if these find no error, and come before the trainer's check
#: of the models.
PROJECT: tuple[Check, ...] = (
    cluster_checks.access_problems,
    cluster_checks.placement_problems,
    cluster_checks.environment_problems,
    project_checks.algorithm_problems,
    project_checks.folder_problems,
    project_checks.service_problems,
    project_checks.model_problems,
)
#: The checks that need tasks, demonstrations or a dataset, and the user's code.
DATA: tuple[Check, ...] = (
    data_checks.task_problems,
    data_checks.prompt_problems,
    data_checks.dataset_problems,
    data_checks.demonstration_findings,
)
#: What is worth knowing about data without errors.
NOTICES: tuple[Check, ...] = (
    data_checks.context_notices,
    data_checks.task_notices,
    data_checks.dataset_notices,
    data_checks.regression_notices,
)


def findings(project: Project, here: Machine, dry: bool = False) -> list[Finding]:
    """What all checks of a project find. With ``dry``, models that a run would download are not looked up."""
    found = list(settings_findings(project.settings, here))
    if has_errors(found):
        return found
    models_of_hub = project_checks.unfetched_models if dry else project_checks.missing_models
    with notes().status("checking settings, data and code") as status, model_check(project.config) as models:
        for check in (*PROJECT, *DATA, models_of_hub):
            found += check(project)
        if not has_errors(found):  # wait for the check of the models, which takes seconds, only if all others pass
            status.update("checking that the trainer accepts the model")
            found += map(error, models.problems())
    for check in NOTICES if not has_errors(found) else ():
        found += check(project)
    return found


def check_run(home: Home, config: RftConfig, dry: bool = False, service: bool = False) -> RunPlan:
    """The plan of a run that may start. Raises UserError with a line for each problem; writes nothing.

    With ``dry``, a run that would be refused because of its mode gets a plan too, with a note about the refusal.
    ``service``: ``rft serve`` starts the run.
    """
    wrong = list(_wrong_command(config, service))
    if not dry:
        refuse(wrong)
    project = project_in(home, config)
    here = machine_of(project)
    found = findings(project, here, dry)
    refuse(found)
    if not dry:
        _check_records(project)
    task_count = len(project.tasks.tasks) if config.buffer.explorer_input.explored else None
    plan = run_plan(project.settings, gpu_count=here.gpus, task_count=task_count, gpu_bytes=here.gpu_bytes)
    plan.sections["cluster"] = cluster_checks.placement_lines(project)
    plan.sections["tasks"] += data_checks.task_lines(project)
    return replace(plan, home=str(home.root), findings=(*wrong, *found))


def project_findings(home: Home, config: Path | None = None) -> Iterator[Finding]:
    """Whether the project in ``home`` could start here: what ``rft run --dry-run`` finds, and lost records.

    With ``config``, whether it could start or continue with the configuration in this file.
    """
    if config is None and not home.config_file.exists():
        yield note("none yet; `rft demo` or `rft run --config FILE` starts one", key="project")
        return
    try:
        project = project_in(home, load_config_of(home) if config is None else load_config(config))
        found = findings(project, machine_of(project), dry=True)
    except RftError as problem:
        yield from (error(line, key="project") for line in str(problem).splitlines())
        return
    found += raised(_check_records, project, key="project", kind=RftError)
    yield from found
    if not has_errors(found):
        yield note(f"{project.config.project}/{project.config.name}, {config or home.config_file}", key="project")


def _check_records(project: Project) -> None:
    """Raise the error of a registry or a judgement that was lost, with its remedy."""
    from rft_platform.rounds.maintenance.verification import check_judgements
    from rft_platform.rounds.setup.connections import check_registry

    check_registry(project)
    check_judgements(project.store)


def _wrong_command(config: RftConfig, service: bool) -> Iterator[Finding]:
    """Why this command cannot run the configuration."""
    if config.online and not service:
        yield error(
            f"mode {config.mode} without a taskset and with storage_type sql trains on production traffic: start it "
            "with `rft serve --config FILE`"
        )
    elif service and not config.online:
        yield error(
            "this is no online project, because it explores tasks: start it with `rft run`, or leave out "
            "buffer.explorer_input.taskset and set buffer.trainer_input.experience_buffer.storage_type: sql",
            key="mode",
        )


def doctor_checks(config: Path | None = None) -> tuple[Callable[[Home], Iterator[Finding]], ...]:
    """The checks of ``rft doctor``, of the installation and of the project in a home, cheapest first.

    ``config``: the file to check instead of the project's configuration in force.
    """
    return (
        machine.python_findings,
        machine.package_findings,
        machine.home_findings,
        partial(project_findings, config=config),
        cluster_checks.cluster_findings,
        machine.database_findings,
        machine.partition_findings,
        machine.process_findings,
        machine.port_findings,
        machine.device_findings,
        machine.definition_findings,
    )
