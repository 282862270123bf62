"""The process of a trainer rank: how it ends when it cannot start."""

import json
import sys
from typing import Any

import pytest

from rft_platform.cluster.local.service_process import ServiceProcess
from rft_platform.common.errors import DiskFullError
from rft_platform.training.distributed import Ranks
from rft_platform.training.service import worker


def test_an_error_at_the_start_ends_the_process_with_one_line(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    def lead(session: Any, service: ServiceProcess) -> None:
        raise DiskFullError("leases/trainer.json: no space left on the disk")

    options = {"threads": 1, "dtype": "float32", "device": "cpu", "layout": {}}
    monkeypatch.setattr(sys, "argv", ["worker", json.dumps(options)])
    monkeypatch.setattr(Ranks, "join", lambda *_: ranks)
    monkeypatch.setattr(ServiceProcess, "from_environment", lambda name: None)
    for name in ("configure", "end_with_starter"):
        monkeypatch.setattr(worker, name, lambda *_: None)
    monkeypatch.setattr(worker, "_lead", lead)
    with pytest.raises(SystemExit) as ended:
        worker.main()
    assert ended.value.code == "error: leases/trainer.json: no space left on the disk"
