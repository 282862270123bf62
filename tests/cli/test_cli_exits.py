"""Which message and exit code a failure ends with."""

import errno
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import Result

from rft_platform.cli.exits import complain, disk_trouble, exit_codes
from rft_platform.common.errors import TrainerError, UserError


def exit_code_of(error: BaseException) -> int:
    with pytest.raises(typer.Exit) as caught, exit_codes():
        raise error
    return caught.value.exit_code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("bad"), 2),
        (TrainerError("broken"), 1),
        (KeyboardInterrupt(), 130),
        (OSError(errno.ENOSPC, "No space left on device", "/x/rows.parquet"), 2),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def test_each_line_of_a_message_is_an_error_line(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code_of(UserError("first\nsecond, its log:\n  a line of the log\n"))

    assert capsys.readouterr().err == "error: first\nerror: second, its log:\n  a line of the log\n"


def test_an_unexpected_exception_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), exit_codes():
        raise ZeroDivisionError


def test_a_typer_exit_keeps_its_code() -> None:
    assert exit_code_of(typer.Exit(7)) == 7


def test_a_full_disk_is_found_behind_other_exceptions() -> None:
    def fail() -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "/x/rows.parquet")
        except OSError as error:
            raise RuntimeError("step failed") from error

    with pytest.raises(RuntimeError) as caught:
        fail()

    assert disk_trouble(caught.value) == (
        "/x/rows.parquet: no space left on the disk: free disk space, or point RFT_HOME at another disk"
    )
    assert disk_trouble(RuntimeError("something else")) is None


def test_a_database_that_cannot_be_written_is_a_disk_fault() -> None:
    connection = sqlite3.connect("file:nowhere?mode=memory", uri=True)
    connection.execute("PRAGMA query_only = on")
    with pytest.raises(sqlite3.OperationalError) as caught:
        connection.execute("CREATE TABLE rows (id INTEGER)")
    connection.close()

    assert "read-only" in (disk_trouble(caught.value) or "")


def test_the_version_is_printed(rft: Callable[..., Result]) -> None:
    result = rft("--version")

    assert result.exit_code == 0
    assert re.fullmatch(r"rft_platform \d+\.\d+\S*\n", result.stdout)


def test_a_mistyped_command_gets_a_suggestion(rft: Callable[..., Result]) -> None:
    result = rft("doctr")

    assert result.exit_code == 2
    assert "Did you mean 'doctor'?" in result.stderr


@pytest.mark.parametrize(("given", "meant"), [("train", "run"), ("trian", "run"), ("evaluate", "eval")])
def test_a_command_of_other_tools_names_the_one_here(rft: Callable[..., Result], given: str, meant: str) -> None:
    result = rft(given, "--config", "rft.yaml")
    assert result.exit_code == 2 and f"did you mean `rft {meant}`?" in result.stderr


def test_a_shell_completes_commands_and_options(tmp_path: Path) -> None:
    def completed(words: str, number: int) -> list[str]:
        environment = {**os.environ, "_RFT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        command = [Path(sys.executable).with_name("rft")]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("rft ru", 1) == ["run"]
    assert completed("rft run --dr", 2) == ["--dry-run"]


def test_a_line_that_repeats_a_long_value_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    complain("lr: got '" + "x" * 5000 + "'; input should be a number\n\n  the end of a log")

    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: lr: got 'xxx")
    assert first.endswith("xxx'; input should be a number")
    assert len(first) < 1100
    assert second == "  the end of a log"
