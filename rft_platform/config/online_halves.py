"""An online project as two commands on one ``RFT_HOME``: one serves (mode serve), one trains (mode train).

Each command has its own file. The project's stored configuration joins the two: the file of mode serve decides
the sections ``SERVING``, the file of mode train decides all others. Its mode is both once both files are known.
"""

from rft_platform.common.errors import UserError
from rft_platform.config.allowed_changes import changed_keys, flat_settings
from rft_platform.config.findings import Finding, warning
from rft_platform.config.schema.rft_config import RftConfig

SERVING = ("explorer", "service", "engine")
_HALVES = ("serve", "train")
#: Keys that both files must give the same values, and the keys below them.
_SHARED = ("checkpoint_root_dir", "model", "buffer.trainer_input.experience_buffer")


def joined(stored: RftConfig | None, given: RftConfig) -> RftConfig:
    """The configuration of the project after a command with ``given`` joined it; ``stored`` is the one before.

    It is ``given`` unless the other half has a part in ``stored``. Raises UserError if both halves need the same value
    of a key and have different ones.
    """
    if stored is None or not _joins(stored, given):
        return given
    serving, training = (given, stored) if given.mode == "serve" else (stored, given)
    whole = training.model_copy(update={"mode": "both", **_sections(serving)})
    differing = [key for key in changed_keys(stored, given) if _is_shared(key)]
    if differing:
        raise UserError(
            f"the other half of this project has other values of {', '.join(sorted(differing))}: give these keys the "
            "same values in the files of mode serve and mode train"
        )
    return whole


def decided_elsewhere(whole: RftConfig, given: RftConfig) -> list[Finding]:
    """A warning for each key that ``given`` sets and whose value the other half's file decides."""
    default, own = flat_settings(RftConfig()), flat_settings(given)
    other = "train" if given.mode == "serve" else "serve"
    return [
        warning(f"{key} {mine!r} has no effect here: the file of mode {other} decides it ({decided!r})")
        for key, (mine, decided) in changed_keys(given, whole).items()
        if key != "mode" and key in own and mine != default.get(key)
    ]


def before_joining(stored: RftConfig, whole: RftConfig) -> RftConfig:
    """``stored`` with those sections of ``whole`` that no file had decided, because their half starts now."""
    if whole.mode != "both" or stored.mode not in _HALVES or not stored.online:
        return stored
    if stored.mode == "train":
        return stored.model_copy(update=_sections(whole))
    return whole.model_copy(update=_sections(stored))


def _joins(stored: RftConfig, given: RftConfig) -> bool:
    """Whether ``given`` is one half of the project ``stored`` and the other half has a part in it."""
    same = (stored.project, stored.name) == (given.project, given.name) and stored.online and given.online
    return same and given.mode in _HALVES and stored.mode in {*_HALVES, "both"} - {given.mode}


def _sections(config: RftConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in SERVING}


def _is_shared(key: str) -> bool:
    return any(key == shared or key.startswith((f"{shared}.", f"{shared}[")) for shared in _SHARED)
