"""Names of the tuner API that this platform does not support. Their use raises an error with the reason."""

from typing import Any, NoReturn

from rft_platform.common.errors import UserError

_PROMPTS = (
    "this platform trains weights and does not search for prompts; call tune() with the same workflow, or use the "
    "prompt tuning of agentscope.tuner"
)


class TinkerConfig:
    """Settings of Tinker, a paid training service."""

    def __init__(self, *_positional: Any, **_fields: Any) -> None:
        """Raises UserError: trainings run on this machine."""
        raise UserError(
            "TinkerConfig: Tinker is a paid service, and trainings run on this machine; leave it out. For an adapter "
            "give tune() a config_path with model: {lora_configs: [{lora_rank: 16}]}"
        )


class PromptTuneConfig:
    """Settings of ``tune_prompt()``."""

    def __init__(self, *_positional: Any, **_fields: Any) -> None:
        """Raises UserError: prompts are not tuned."""
        raise UserError(f"PromptTuneConfig: {_PROMPTS}")


def tune_prompt(*_positional: Any, **_arguments: Any) -> NoReturn:
    """Raises UserError: prompts are not tuned."""
    raise UserError(f"tune_prompt: {_PROMPTS}")
