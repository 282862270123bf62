"""Write a configuration to the project's folder, or refuse it."""

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import UserError
from rft_platform.common.files import write_text
from rft_platform.config.allowed_changes import changed_keys, check_unchanged, relocated
from rft_platform.config.dry_run import RunPlan
from rft_platform.config.home import Home
from rft_platform.config.load import dump_config, load_config_of
from rft_platform.config.online_halves import joined, without_effect
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.driver.console import notes
from rft_platform.driver.preflight import check_run
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.record import move_folders


def with_rounds(config: RftConfig, rounds: int | None) -> RftConfig:
    """The configuration with a budget of ``rounds`` rounds; unchanged if ``rounds`` is None."""
    if rounds is None:
        return config
    if config.mode == "train":
        raise UserError("--rounds: mode train uses existing data (explored rounds or a dataset); leave it out")
    buffer = config.buffer.model_copy(update={"total_steps": rounds * config.synchronizer.batches_a_round})
    trainer = config.trainer.model_copy(update={"total_steps": None})
    return config.model_copy(update={"buffer": buffer, "trainer": trainer})


def write_config(home: Home, config: RftConfig) -> None:
    """Write the configuration that every process of the project reads. Raises UserError while another run is active.

    If the other half of the project (mode explore or train) is running, its configuration stays in force, and a
    configuration with other values is refused.
    """
    from rft_platform.jobs.driver_lock import refuse_second_driver

    refuse_second_driver(home, config.mode)
    with locked(home.leases / "config"):  # the other half of an online project may start now too
        _write(home, _joined(home, config))


def stored_config(home: Home) -> RftConfig | None:
    """The project's configuration in force; None before the first start."""
    return load_config_of(home) if home.config_file.exists() else None


def _joined(home: Home, config: RftConfig) -> RftConfig:
    """The project's configuration after a command with ``config``; the folder of its file may have moved."""
    stored = stored_config(home)
    return joined(None if stored is None else relocated(stored, config), config)


def _write(home: Home, config: RftConfig) -> None:
    from rft_platform.jobs.driver_lock import other_half_runs

    if other_half_runs(home, config.mode) and home.config_file.exists():
        running = relocated(load_config_of(home), config)
        check_unchanged(running, config)
        if changed := changed_keys(running, config).keys() - {"mode"}:
            raise UserError(
                f"the other half of this project runs with other values of {', '.join(sorted(changed))}: give both "
                "halves the same settings apart from `mode`, or change them while neither runs"
            )
        return
    _follow_moved_models(home, config)
    write_text(home.config_file, dump_config(config, home))
    if config.folder is not None and config.folder != home.root:  # otherwise the file is the home's own
        write_text(home.config_source, str(config.folder))
    home.make_private()  # the folder may have existed before


def _follow_moved_models(home: Home, config: RftConfig) -> None:
    """If the folder of the user's file has moved with the models in it, records of the project name their new place."""
    stored = stored_config(home) if home.holds_results else None
    if stored is None:
        return
    moved = changed_keys(stored, relocated(stored, config))
    paths = {before: after for before, after in moved.values() if isinstance(before, str)}
    if paths:
        move_folders(ExperienceStore(home.rounds), paths)


def begin(home: Home, config: RftConfig, service: bool = False) -> RunPlan:
    """Check a configuration and write it to the project's folder; returns its plan. ``service``: for ``rft serve``.

    Raises UserError, and writes nothing, if the configuration cannot be run.
    """
    whole = _joined(home, config)
    plan = check_run(home, whole, service=service)
    for notice in (*plan.notices, *without_effect(whole, config)):
        notes().print(f"note: {notice}", markup=False, soft_wrap=True)
    write_config(home, config)
    return plan


def is_in_force(home: Home, config: RftConfig) -> bool:
    """Whether the project of ``home`` was started with exactly this configuration."""
    stored = stored_config(home)
    return stored is not None and stored == _joined(home, config)
