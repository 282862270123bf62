"""Create a project's ``dagster.yaml`` on first use, and update one that an older version of the platform wrote."""

import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from rft_platform.errors import UserError
from rft_platform.files import write_text
from rft_platform.jobs.storage import BLOCK

#: SHA-256 of the files that earlier versions wrote. These files may be replaced, because nobody has edited them.
_EARLIER = frozenset(
    {
        "b64f0fa4b012a23f1df8c63f6f354cf2883f981055d484ef028b21e7f7ad9cc8",
        "1b188d8c0408d49316cf737159c9869ce536a5188b8719a7ef4c9be8e8e7d892",
        "e693c0c5064a9646cd8d9b89a003dac46983b5109defbd2c0ad42658706ed662",
    }
)
#: Sections that the platform needs, each with the section that would replace it.
_NEEDED = {"instance_class": "instance_class", "run_launcher": "run_launcher", "run_queue": "run_coordinator"}


#: Advice for a broken file.
REPAIR_SETTINGS = "set it right, or delete it, and the platform's own settings are written anew"


def shipped_settings() -> str:
    """The file as this version writes it."""
    return resources.files("rft_platform.jobs").joinpath("dagster.yaml").read_text(encoding="utf-8")


def ensure_settings(file: Path) -> None:
    """Create the file or update it; a user's changes in it are kept."""
    shipped = shipped_settings()
    if not file.exists():
        write_text(file, shipped)
        return
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is no text ({error.reason}): {REPAIR_SETTINGS}") from error
    ours_alone = text.removesuffix(BLOCK)
    if ours_alone == shipped:
        return
    if hashlib.sha256(ours_alone.encode()).hexdigest() in _EARLIER:
        write_text(file, shipped + text[len(ours_alone) :])
        return
    sections, ours = _sections(file, text), yaml.safe_load(shipped)
    added = {name: ours[name] for name, instead in _NEEDED.items() if not {name, instead} & set(sections)}
    if added:
        block = yaml.safe_dump(added, sort_keys=False)
        write_text(file, f"{text.rstrip()}\n\n# Added by the platform: see its own dagster.yaml.\n{block}")


def _sections(file: Path, text: str) -> dict[str, Any]:
    try:
        sections = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise UserError(
            f"{file}: {where}{getattr(error, 'problem', None) or 'is no YAML'}: {REPAIR_SETTINGS}"
        ) from error
    if not isinstance(sections, dict):
        raise UserError(f"{file}: is no mapping of sections: {REPAIR_SETTINGS}")
    return sections
