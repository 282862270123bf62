"""Runtime environments of Ray for workers: local paths as URIs, and the error of one that a node cannot build.

Ray uploads local folders for a whole job only. All nodes see the user's code under the same paths, so an actor gets a
folder by a ``local://`` URI, and an archive or a wheel by a ``file://`` URI.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rft_platform.common.errors import UserError

_KEY = "explorer.workers.runtime_env"
_TAIL_LINES = 6


def runtime_environment(given: Mapping[str, Any]) -> Any:
    """The ``ray.runtime_env.RuntimeEnv`` of a configured one. Raises UserError that names what Ray refuses."""
    from ray.runtime_env import RuntimeEnv

    fields = dict(given)
    if "working_dir" in fields:
        fields["working_dir"] = _uri("working_dir", fields["working_dir"])
    if "py_modules" in fields:
        fields["py_modules"] = [_uri("py_modules", entry, of_parent=True) for entry in fields["py_modules"]]
    try:
        return RuntimeEnv(**fields)
    except (TypeError, ValueError, OSError) as error:
        raise UserError(f"{_KEY}: Ray refuses it: {error}") from error


def unbuilt(error: Exception) -> UserError:
    """The user's error for a runtime environment that a node cannot build, with the last lines of Ray's report."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    return UserError(f"{_KEY}: a node cannot build it:\n" + "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]))


def _uri(field: str, entry: str, *, of_parent: bool = False) -> str:
    """``entry`` if it is a URI, else the URI of the local path.

    ``of_parent``: a folder or ``.py`` file is a package or module, which is imported from the folder that contains it.
    """
    if "://" in entry:
        return entry
    path = Path(entry)
    if not path.is_absolute() or not path.exists():
        raise UserError(f"{_KEY}.{field} {entry}: there is no such folder or file; give a path that all nodes see")
    if of_parent and (path.is_dir() or path.suffix == ".py"):
        path = path.parent
    return f"local://{path}" if path.is_dir() else f"file://{path}"
