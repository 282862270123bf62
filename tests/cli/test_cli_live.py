"""Progress as it is shown: lines where nobody watches, a table on a terminal."""

import io
import logging
import re

from rich.console import Console

from rft_platform.driving.live import PlainLines, showing_progress
from rft_platform.driving.live_table import LiveTable
from rft_platform.progress import LOGGER, Progress, report, tell


def test_plain_lines_carry_the_time_and_end_with_the_total() -> None:
    console = Console(file=io.StringIO(), width=160)

    with showing_progress(console):
        report("r0001 rollouts", 256, 512)
        report("r0001 rollouts", 512, 512, reward=0.5)

    lines = console.file.getvalue().splitlines()
    assert len(lines) == 1, "the start of a piece of work is no news yet"
    assert re.fullmatch(r"\d\d:\d\d:\d\d  r0001 rollouts: 512/512  reward 0.5", lines[0])


def test_plain_lines_are_told_now_and_then_while_work_lasts() -> None:
    console = Console(file=io.StringIO(), width=160)
    lines = PlainLines(console, every_s=0.0)

    lines.update(Progress("some work", 1, 3))
    lines.update(Progress("some work", 3, 3))

    assert [line.split("  ", 1)[1] for line in console.file.getvalue().splitlines()] == [
        "some work: 1/3",
        "some work: 3/3",
    ]


def test_news_and_warnings_stand_between_the_reports() -> None:
    console = Console(file=io.StringIO(), width=160)
    news = iter([["round 1 is done"], [], ["round 2 is done"]])

    with showing_progress(console, lambda: next(news)):
        report("a", 1, 1)
        logging.getLogger("rft_platform.somewhere").warning("judge failed on %s", "run 7")
        tell("b: going on after step 3")
        report("b", 1, 1)

    assert [line.split("  ", 1)[1] for line in console.file.getvalue().splitlines()] == [
        "round 1 is done",
        "a: 1/1",
        "warning: judge failed on run 7",
        "b: going on after step 3",
        "b: 1/1",
        "round 2 is done",
    ]


def test_a_terminal_shows_finished_work_as_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)

    with showing_progress(console):
        report("r0001 training", 1, 2, loss=0.25)
        report("r0001 training", 2, 2, loss=0.125)

    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert re.search(r"✓ r0001 training +2 +0\.\d s +loss 0\.125", text)


def test_work_that_ends_early_leaves_the_table_with_its_round() -> None:
    table = LiveTable(Console(file=io.StringIO(), force_terminal=True, width=120))

    table.update(Progress("warm start", 315, 1500))
    assert [row.description for row in table.bars.tasks] == ["warm start"]
    table.announce("start  held-out sampled 60%")

    assert table.bars.tasks == []


def test_nothing_is_listened_to_afterwards() -> None:
    before = list(LOGGER.handlers)

    with showing_progress(Console(file=io.StringIO())):
        assert len(LOGGER.handlers) == len(before) + 1

    assert LOGGER.handlers == before
