"""Log files stay bounded while their writers go on."""

import os
import subprocess
import sys
import time
from pathlib import Path

from rft_platform.cluster.local.log_files import DEFAULT_MAX_BYTES, bound_logs, logs_bounded, max_log_bytes
from rft_platform.cluster.local.processes import start_detached

# Writes a line for each line it is sent through a fifo, to the log it was started with.
_WRITER = """
import sys
for line in open(sys.argv[1]):
    print("x" * 100, line.strip(), flush=True)
    open(sys.argv[2], "w").write(line)
"""


def test_a_large_log_is_rotated_while_its_writer_continues(tmp_path: Path) -> None:
    log, orders, answers = tmp_path / "engine.log", tmp_path / "orders", tmp_path / "answers"
    os.mkfifo(orders)
    os.mkfifo(answers)
    writer = start_detached([sys.executable, "-c", _WRITER, str(orders), str(answers)], log, dict(os.environ))
    with orders.open("w", buffering=1) as tell:
        tell.write("first\n")
        assert answers.read_text() == "first\n"
        assert bound_logs(tmp_path, max_bytes=1000) == []
        assert bound_logs(tmp_path, max_bytes=50) == [log]
        assert log.stat().st_size == 0
        tell.write("second\n")
        assert answers.read_text() == "second\n"
    writer.wait(timeout=30)
    aside = log.with_name("engine.log.1")
    assert aside.read_text().endswith("x first\n")
    assert log.read_text().endswith("x second\n")
    assert "\0" not in log.read_text()
    assert aside.stat().st_mode & 0o077 == 0


def _hold(lock: Path) -> subprocess.Popen[bytes]:
    """A process that holds the lock until it is sent a line."""
    program = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(1, flush=True); input()"
    held = subprocess.Popen([sys.executable, "-c", program, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert held.stdout is not None
    held.stdout.readline()
    return held


def test_only_one_process_rotates_a_log(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("x" * 100)
    held = _hold(tmp_path / ".bounding.lock")
    assert bound_logs(tmp_path, max_bytes=10) == []
    held.communicate(b"\n", timeout=30)
    assert bound_logs(tmp_path, max_bytes=10) == [tmp_path / "a.log"]


def test_the_copy_of_a_large_log_is_its_end(tmp_path: Path) -> None:
    (tmp_path / "driver.log").write_text("".join(f"line {number:04}\n" for number in range(1000)))
    bound_logs(tmp_path, max_bytes=25)
    assert (tmp_path / "driver.log.1").read_text() == "0997\nline 0998\nline 0999\n"


def test_the_limit_comes_from_the_environment(monkeypatch) -> None:
    assert max_log_bytes() == DEFAULT_MAX_BYTES
    monkeypatch.setenv("RFT_LOG_MAX_BYTES", "1000")
    assert max_log_bytes() == 1000


def test_a_log_stays_bounded_while_a_phase_prints(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RFT_LOG_MAX_BYTES", "100000")
    log = tmp_path / "driver.log"
    with logs_bounded(tmp_path, every_s=0.02), log.open("a", buffering=1) as stream:
        deadline = time.monotonic() + 30
        while not log.with_name("driver.log.1").exists() and time.monotonic() < deadline:
            stream.write("x" * 10_000 + "\n")
            time.sleep(0.001)
        assert log.with_name("driver.log.1").exists()
        while log.stat().st_size and time.monotonic() < deadline:  # a line between copy and truncation would be lost
            time.sleep(0.001)
        stream.write("the last line\n")
    assert log.read_text().endswith("the last line\n")
