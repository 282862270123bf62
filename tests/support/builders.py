"""Small builders and checks that tests of several files need."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rft_platform.common.errors import UserError
from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.findings import refuse
from rft_platform.config.load import load_config
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.training.protocol import StepEvent, TrainRequest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Step:
    """An optimiser step with its metrics."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)


def load_text(folder: Path, text: str) -> RftConfig:
    """The configuration in a file with this text."""
    path = folder / "rft.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def problems(config: RftConfig) -> list[str]:
    """The lines with which the checks refuse a configuration, on a machine without a GPU."""
    try:
        refuse(settings_findings(resolve(config), Machine(2, 0)))
    except UserError as error:
        return str(error).splitlines()
    return []


def write_rows(file: Path, rows: list[dict[str, Any]]) -> str:
    """A JSONL file with these rows; returns its path."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def messages(role: str, texts: Iterable[str]) -> list[str]:
    """Each text as a list of one message, as JSON."""
    return [json.dumps([{"role": role, "content": text}]) for text in texts]


def preferences_file(file: Path, rows: Iterable[tuple[str, str, str]]) -> str:
    """Pairs of prompt, chosen and rejected, as the platform writes them; returns the path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    columns = zip(*rows, strict=True)
    cells = {name: messages(role, texts) for (name, role), texts in zip(roles.items(), columns, strict=True)}
    pq.write_table(pa.table(cells), file)
    return str(file)


def flip_a_byte(file: Path) -> None:
    """Damage a file without a change of its size."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def train(session: Any, request: TrainRequest) -> tuple[Any, list[StepEvent]]:
    """The result of a training, and its steps."""
    events: list[StepEvent] = []
    return session.train(request, events.append, lambda: False), events


def gradients(model: Any) -> dict[str, "Tensor"]:
    """Copies of the gradients by parameter; the model has none afterwards."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 120) -> None:
    """Wait until ``condition`` holds; fails with ``what`` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)
