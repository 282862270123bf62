"""Print the user's code behind a training, and its differences from the code of the training before."""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from rft_platform.common.code_snapshot import CodeSnapshot
    from rft_platform.rounds.reporting.lineage import CheckpointTrace, TrainingTrace

_SHOWN = 40  # lines of a difference without --code


def print_user_code(found: "CheckpointTrace", root: Path, console: "Console", *, whole: bool) -> None:
    """Print the user's code of the newest training: digest, files, and the differences from the training before.

    ``root`` is the folder of the experience store, which has the snapshots of the code. Unless ``whole``, at most
    ``_SHOWN`` lines of the differences are printed.
    """
    newest, *before = found.trainings
    digests = _digests(newest)
    if not digests:
        if whole:
            console.print("no user code: the configuration names only parts of the platform", markup=False)
        return
    now = _snapshot(newest, root)
    if now is None:
        console.print(f"user code {', '.join(digests)}: its snapshot is not in {root}", markup=False, soft_wrap=True)
        return
    earlier = next((training for training in before if _digests(training)), None)
    changes = [] if earlier is None else list(_changes(earlier, newest, now, root))
    state = "" if earlier is None else f"; {_state(earlier, changes)}"
    heading = f"user code {', '.join(digests)}: {', '.join(now.files) or 'no source found'}{state}"
    console.print(heading, style="bold", markup=False, soft_wrap=True)
    for line in changes if whole else islice(changes, _SHOWN):
        console.print(line, style=_STYLES.get(line[:1]), markup=False, highlight=False, soft_wrap=True)
    if not whole and len(changes) > _SHOWN:
        console.print(f"... {len(changes) - _SHOWN} more lines (--code shows them)", markup=False)
    if whole and not changes:
        for name, file in now.files.items():
            console.print(f"--- {name}", style="bold", markup=False, highlight=False, soft_wrap=True)
            console.print(file.text.rstrip(), markup=False, highlight=False, soft_wrap=True)


_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def _digests(training: "TrainingTrace") -> list[str]:
    """Digests of the snapshots of the exploring and of the judging code; one digest if both are equal."""
    noted = (training.more.get("workflow_code"), training.more.get("judge_code"))
    return sorted({digest for entry in noted if entry for digest in str(entry).split(", ")})


def _snapshot(training: "TrainingTrace", root: Path) -> "CodeSnapshot | None":
    """All files of the training's snapshots; a file with two versions appears once per version."""
    from rft_platform.common.code_snapshot import CodeSnapshot, SourceFile, read_snapshot

    files: dict[str, SourceFile] = {}
    not_found: list[str] = []
    for digest in _digests(training):
        found = read_snapshot(root, digest)
        if found is None:
            return None
        for name, file in found.files.items():
            files[name if files.get(name, file) == file else f"{name} ({digest})"] = file
        not_found += found.not_found
    return CodeSnapshot(files, tuple(dict.fromkeys(not_found)))


def _changes(earlier: "TrainingTrace", newest: "TrainingTrace", now: "CodeSnapshot", root: Path) -> list[str]:
    from rft_platform.common.code_snapshot import difference

    then = _snapshot(earlier, root)
    if then is None:
        return [f"the snapshot {', '.join(_digests(earlier))} of the training before is not in {root}"]
    return list(difference(then, now, _version(earlier), _version(newest)))


def _state(earlier: "TrainingTrace", changes: list[str]) -> str:
    return f"{'changed since' if changes else 'the same as for'} {_version(earlier)}"


def _version(training: "TrainingTrace") -> str:
    return f"policy version {training.result.policy_version}"
