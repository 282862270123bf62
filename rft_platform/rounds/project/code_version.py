"""The versions of the running code for lineage: the platform's, and the user's with a copy of its source."""

import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import rft_platform
from rft_platform.common.code_snapshot import keep_snapshot, references_in, take_snapshot
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.notes import EXPLORE, JUDGE
from rft_platform.rounds.project.project import Project

_NOTED = "user_code"  # key of the digest in notes
_SOURCE = Path(rft_platform.__file__).resolve()


@cache
def code_version() -> str:
    """Git commit of the package's own repository, ``-dirty`` with local changes; otherwise the package version.

    The result does not depend on the working directory. A repository that only contains an installed copy is ignored.
    """
    try:
        _git("ls-files", "--error-unmatch", _SOURCE.name)
        return _git("describe", "--always", "--abbrev=40", "--dirty")
    except (OSError, subprocess.SubprocessError):
        return f"rft-platform {rft_platform.__version__}"


def note_user_code(project: Project, *further: Any) -> dict[str, str]:
    """Store the source of the user's code that the configuration (and ``further`` settings) name.

    Returns the entry of a stage's note: the digest of the snapshot; empty if no user code is configured.
    """
    config = project.config
    references = [*references_in(config.model_dump(mode="json")), *references_in(list(further))]
    snapshot = take_snapshot([*references, *config.algorithm.plugins])
    digest = keep_snapshot(project.store.root, snapshot)
    return {} if digest is None else {_NOTED: digest}


def user_code_of(store: ExperienceStore, rounds: Iterable[int]) -> dict[str, str]:
    """Entries of a lineage: the user's code that explored the rounds, and that judged them, as digests."""
    found = {}
    for name, note in (("workflow_code", EXPLORE), ("judge_code", JUDGE)):
        digests = {(store.read_note(number, note) or {}).get(_NOTED) for number in rounds} - {None}
        if digests:
            found[name] = ", ".join(sorted(map(str, digests)))
    return found


def _git(*words: str) -> str:
    result = subprocess.run(
        ["git", *words], cwd=_SOURCE.parent, capture_output=True, text=True, timeout=10, check=True
    )  # fmt: skip
    return result.stdout.strip()
