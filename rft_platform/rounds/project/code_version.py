"""The versions of the running code for lineage: the platform's, and the user's with a copy of its source."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import rft_platform
from rft_platform.cluster.child import Program
from rft_platform.common.code_snapshot import keep_snapshot, references_in, take_snapshot
from rft_platform.common.user_code import is_live
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Explored, Judged, RoundRecord

_SOURCE = Path(rft_platform.__file__).resolve()


@cache
def code_version() -> str:
    """Git commit of the package's own repository, ``-dirty`` with local changes; otherwise the package version.

    The result does not depend on the working directory. A repository that only contains an installed copy is ignored.
    """
    try:
        _git("ls-files", "--error-unmatch", _SOURCE.name)
        return _git("describe", "--always", "--abbrev=40", "--dirty")
    except (OSError, ValueError):
        return release()


def release() -> str:
    """Name and version of the package."""
    return f"rft-platform {rft_platform.__version__}"


def code_of(config: RftConfig) -> str:
    """The code version of a project's assets: the platform's release, and the user's code that ``config`` names.

    Imports none of the user's code. Functions that exist only in the memory of another process do not count. The commit
    of the platform is not part of it (lineage and run tags have it): Dagster would mark all rounds as unsynced after
    every commit.
    """
    references = [*references_in(config.model_dump(mode="json")), *config.algorithm.plugins]
    found = [reference for reference in references if not is_live(reference)]
    return f"{release()}+{take_snapshot(found, _folders(config)).digest}" if found else release()


def keep_user_code(project: Project, *further: Any) -> str | None:
    """Store the source of the user's code that the configuration (and ``further`` settings) name.

    Returns the digest of the snapshot, for the note of a stage; None if no user code is configured.
    """
    config = project.config
    references = [*references_in(config.model_dump(mode="json")), *references_in(list(further))]
    return keep_snapshot(project.store.root, take_snapshot([*references, *config.algorithm.plugins], _folders(config)))


def _folders(config: RftConfig) -> list[str]:
    """The folders from which workers import before others."""
    return config.explorer.workers.runtime_env.folders


def user_code_of(judged: Iterable[tuple[RoundRecord, str]]) -> dict[str, str]:
    """Entries of a lineage: the user's code that explored and judged its rounds, each given with a judge version."""
    found: dict[str, set[str | None]] = {"workflow_code": set(), "judge_code": set()}
    for record, version in judged:
        found["workflow_code"].add((record.explored or Explored()).workflow_code)
        found["judge_code"].add((record.judged or Judged()).judge_codes.get(version))
    return {name: ", ".join(sorted(filter(None, digests))) for name, digests in found.items() if any(digests)}


def _git(*words: str) -> str:
    output = Program(["git", *words], wall_s=10, cwd=_SOURCE.parent).run()
    if not output.ok:
        raise ValueError(f"git {words[0]} ended with exit code {output.exit_code}")
    return output.stdout.decode().strip()
