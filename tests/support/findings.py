"""What the checks of a configuration find, as lines."""

from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.rft_config import RftConfig


def warnings_of(config: RftConfig, gpus: int = 0) -> list[str]:
    """The settings that have no effect, or are perhaps not intended, on a machine with two processors."""
    found = settings_findings(resolve(config), Machine(cpus=2, gpus=gpus))
    return [finding.text for finding in found if finding.level == "warning"]
