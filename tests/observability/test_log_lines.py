"""Log lines: words or JSON, with round, run and phase, on the standard error of the process that writes them."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rft_platform.common.errors import EngineError, UserError
from rft_platform.common.progress import report
from rft_platform.observability.log_context import HEADER, PhaseContext, context_headers, current
from rft_platform.observability.logs import configured, phase_context

LOG = logging.getLogger("rft_platform.some.folder")


@pytest.fixture
def json_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[], list[dict[str, Any]]]:
    """What was logged as JSON since the last call."""
    monkeypatch.setenv("RFT_LOG_FORMAT", "json")
    return lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_json_log_line_has_logger_message_and_round(json_lines) -> None:
    with configured("trainer"), phase_context(3, "1f2e3d4c-aa", "policy_checkpoint"):
        LOG.warning("loss is %.1f", 0.5)
    line = json_lines()[1]
    assert line.pop("ts").endswith("+00:00")
    assert line.pop("pid")
    assert line == {
        "level": "WARNING",
        "process": "trainer",
        "logger": "rft_platform.some.folder",
        "round": "r0003",
        "run_id": "1f2e3d4c-aa",
        "phase": "policy_checkpoint",
        "message": "loss is 0.5",
        "exception": None,
    }


def test_begin_end_and_failure_of_a_phase_are_logged(json_lines) -> None:
    with configured("driver"), pytest.raises(EngineError), phase_context("r0001", "run", "rollout_batches"):
        raise EngineError("the engine at http://me:pw123456@h does not answer")
    begin, failure = json_lines()
    assert (begin["level"], begin["message"]) == ("INFO", "begins")
    assert failure["level"] == "ERROR"
    assert "rollout_batches of r0001 failed after" in failure["message"]
    assert "EngineError" in failure["exception"]
    assert "pw123456" not in json.dumps(failure)


def test_people_get_one_readable_line(capsys: pytest.CaptureFixture[str]) -> None:
    with configured("run"), phase_context(12, "1f2e3d4c-aa", "judged_experiences"):
        LOG.info("judged with api_key=%s", "abcdefgh")
    line = capsys.readouterr().err.splitlines()[1]
    assert line.endswith("INFO run r0012/judged_experiences@1f2e3d4c rft_platform.some.folder: judged with api_key=***")


def test_threads_of_a_phase_log_for_it_and_nothing_is_left_behind(json_lines) -> None:
    with configured("run"):
        with phase_context(7, "run", "rollout_batches"):
            worker = threading.Thread(target=LOG.info, args=("from a thread",))
            worker.start()
            worker.join()
        LOG.info("later")
    lines = {line["message"]: line for line in json_lines()}
    assert lines["from a thread"]["round"] == "r0007"
    assert lines["later"]["round"] is None


def test_concurrent_phases_are_kept_apart() -> None:
    seen: dict[str, PhaseContext] = {}
    with phase_context(1, "a", "train"):
        outer = threading.Thread(target=_inside_another_phase, args=(seen,))
        outer.start()
        outer.join()
        assert current().round == "r0001"
    assert seen["own"].round == "r0002"
    assert seen["stranger"] == PhaseContext()


def _inside_another_phase(seen: dict[str, PhaseContext]) -> None:
    with phase_context(2, "b", "explore"):
        seen["own"] = current()
        stranger = threading.Thread(target=lambda: seen.update(stranger=current()))
        stranger.start()
        stranger.join()


def test_the_log_context_is_sent_to_another_process() -> None:
    assert context_headers() == {}
    with phase_context(4, "run-4", "evaluation_report"):
        assert PhaseContext.from_header(context_headers()[HEADER]) == current()
    assert PhaseContext.from_header("nonsense") == PhaseContext()


def test_libraries_are_heard_from_warnings_on_and_progress_now_and_then(json_lines) -> None:
    with configured("run"):
        logging.getLogger("httpx").info("POST ...")
        logging.getLogger("httpx").warning("slow")
        for done in range(1, 5):
            report("a piece of work", done, 4)
    assert [line["message"] for line in json_lines()] == ["slow", "a piece of work: 1/4", "a piece of work: 4/4"]


def test_an_unknown_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_LOG_FORMAT", "xml")
    with pytest.raises(UserError, match="RFT_LOG_FORMAT is 'xml': set it to human or json"), configured("run"):
        pass


_RUN_WORKER = """
import sys
sys.argv = ["dagster", "api", "execute_run", "..."]
import dagster as dg
from rft_platform.observability.logs import phase_context

@dg.op
def work(context):
    with phase_context(1, context.run_id, "work"):
        context.log.info("said through Dagster")

@dg.job
def job():
    work()

job.execute_in_process()
"""


@pytest.mark.slow
def test_in_a_run_worker_logging_is_set_up_and_dagsters_own_lines_stay() -> None:
    done = subprocess.run([sys.executable, "-c", _RUN_WORKER], capture_output=True, text=True, timeout=120, check=True)
    (begin,) = [line for line in done.stderr.splitlines() if line.endswith("rft_platform.phase: begins")]
    assert " INFO run r0001/work@" in begin
    assert "said through Dagster" in done.stderr
