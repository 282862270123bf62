"""Check the names of the project, the run and the registered model: they become folder names and names in MLflow."""

from collections.abc import Iterator

from rft_platform.config.schema import RftConfig

_LONGEST = 100  # characters: folder names and MLflow allow 250 bytes, and a character may take four
_FORBIDDEN = "/\\:'\""


def name_problems(config: RftConfig) -> Iterator[str]:
    """One line for each invalid name."""
    names = {"project": config.project, "name": config.name}
    if config.registry.model_name is not None:
        names["registry.model_name"] = config.registry.model_name
    for key, name in names.items():
        if (fault := _fault(name)) is not None:
            yield f"{key} {name!r}: {fault}; expected a name such as gsm8k-first"


def _fault(name: str) -> str | None:
    if not name.strip():
        return "is empty"
    if name != name.strip():
        return "begins or ends with a space"
    if name in (".", ".."):
        return "means another folder"
    if found := [character for character in _FORBIDDEN if character in name]:
        return f"has the character {found[0]!r}, which folders or MLflow do not take"
    if not name.isprintable():
        return "has characters that cannot be printed"
    return f"is longer than {_LONGEST} characters" if len(name) > _LONGEST else None
