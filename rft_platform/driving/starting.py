"""Write a configuration to the project's folder, or refuse it."""

from rft_platform.config.home import Home
from rft_platform.config.load import dump_config, load_config
from rft_platform.config.resume import check_unchanged
from rft_platform.config.schema import RftConfig
from rft_platform.errors import UserError
from rft_platform.files import write_text


def with_rounds(config: RftConfig, rounds: int | None) -> RftConfig:
    """The configuration with a budget of ``rounds`` rounds; unchanged if ``rounds`` is None."""
    if rounds is None:
        return config
    if config.mode == "train":
        raise UserError("--rounds: mode train works on what there is, explored rounds or a dataset; leave it out")
    buffer = config.buffer.model_copy(update={"total_steps": rounds * config.synchronizer.batches_a_round})
    trainer = config.trainer.model_copy(update={"total_steps": None})
    return config.model_copy(update={"buffer": buffer, "trainer": trainer})


def check_may_start(home: Home, config: RftConfig) -> None:
    """Raise UserError if the folder has results of another project, or of this one with other settings."""
    if not home.config_file.exists() or not home.holds_results:
        return
    old = load_config(home.config_file)
    if (old.project, old.name) != (config.project, config.name):
        raise UserError(
            f"{home.root} holds the project {old.project}/{old.name}, not {config.project}/{config.name}: point "
            "RFT_HOME at another folder, or move this one aside"
        )
    check_unchanged(old, config)
    if not config.continue_from_checkpoint and home.rounds.is_dir():
        raise UserError(
            f"continue_from_checkpoint is false, and {home.root} holds rounds of {old.project}/{old.name}: set it to "
            "true to go on, or point RFT_HOME at another folder"
        )


def put_in_force(home: Home, config: RftConfig) -> None:
    """Write the configuration that every process of the project reads. Raises UserError while another run is active."""
    from rft_platform.jobs.driver_lock import refuse_second_driver

    refuse_second_driver(home)
    write_text(home.config_file, dump_config(config))
    home.make_private()  # the folder may have existed before
