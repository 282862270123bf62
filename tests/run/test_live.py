"""Progress as it is shown: lines where nobody watches, a table on a terminal."""

import io
import logging
import re
import time

from rich.console import Console

from rft_platform.common.progress import LOGGER, Progress, announce, report
from rft_platform.observability.log_context import phase_context
from rft_platform.run.live import LiveTable, PlainLines, showing_progress


def test_plain_lines_carry_the_time_and_end_with_the_total() -> None:
    console = Console(file=io.StringIO(), width=160)

    with showing_progress(console):
        report("r0001 rollouts", 256, 512)
        report("r0001 rollouts", 512, 512, reward=0.5)

    lines = console.file.getvalue().splitlines()
    assert len(lines) == 1, "the start of a piece of work is no news yet"
    assert re.fullmatch(r"\d\d:\d\d:\d\d  r0001 rollouts: 512/512  reward 0.5", lines[0])


def test_plain_progress_lines_are_printed_periodically() -> None:
    console = Console(file=io.StringIO(), width=160)
    lines = PlainLines(console, every_s=0.0)

    lines.update(Progress("some work", 1, 3))
    lines.update(Progress("some work", 3, 3))

    assert [line.split("  ", 1)[1] for line in console.file.getvalue().splitlines()] == [
        "some work: 1/3",
        "some work: 3/3",
    ]


def test_a_long_silence_ends_with_what_runs() -> None:
    console = Console(file=io.StringIO(), width=160)
    lines = PlainLines(console, silent_s=0.1)

    lines.beat()
    time.sleep(0.11)
    lines.beat()  # nothing runs
    with phase_context(3, "0123456789", "policy_checkpoint"):
        lines.beat()
        lines.beat()  # too early again
        lines.update(Progress("r0003 training", 2, 8))
        time.sleep(0.11)
        lines.beat()

    said = [line.split("  ", 1)[1] for line in console.file.getvalue().splitlines()]
    assert said == [
        "still running: r0003/policy_checkpoint@01234567 (no news for 0 s)",
        "still running: r0003 training: 2/8 (no news for 0 s)",
    ]


def test_work_that_ended_below_its_total_no_longer_runs() -> None:
    console = Console(file=io.StringIO(), width=160)
    lines = PlainLines(console, silent_s=0.1)

    with phase_context(3, "0123456789", "rollout_batches"):
        lines.update(Progress("r0003 rollouts", 60, 64))
    time.sleep(0.11)
    lines.beat()  # nothing runs
    with phase_context(3, "0123456789", "judged_experiences"):
        lines.beat()

    said = [line.split("  ", 1)[1] for line in console.file.getvalue().splitlines()]
    assert said == ["still running: r0003/judged_experiences@01234567 (no news for 0 s)"]


def test_news_and_warnings_are_printed_between_reports() -> None:
    console = Console(file=io.StringIO(), width=160)
    news = iter([["round 1 is done"], [], [], ["round 2 is done"]])

    with showing_progress(console, lambda: next(news)):
        report("a", 1, 1)
        logging.getLogger("rft_platform.somewhere").warning("judge failed on %s", "run 7")
        announce("b: continues after step 3")
        report("b", 1, 1)

    assert [line.split("  ", 1)[1] for line in console.file.getvalue().splitlines()] == [
        "round 1 is done",
        "a: 1/1",
        "warning: judge failed on run 7",
        "b: continues after step 3",
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


def plain(console: Console) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_the_duration_is_that_of_the_work_and_not_of_its_reports() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)

    with showing_progress(console):
        report("r0001 rollouts", 0, 4096)
        time.sleep(0.3)
        report("r0001 rollouts", 4096, 4096)

    assert re.search(r"✓ r0001 rollouts +4,096 +0\.[3-9] s", plain(console))


def test_a_start_is_printed_without_a_terminal_only_after_a_silence() -> None:
    console = Console(file=io.StringIO(), width=160)
    lines = PlainLines(console, every_s=0.4)

    lines.update(Progress("warm start", 0, 1500))
    time.sleep(0.41)
    lines.update(Progress("start evaluation", 0, 300))
    lines.update(Progress("r0001 rollouts", 0, 64))

    assert [line.split("  ", 1)[1] for line in console.file.getvalue().splitlines()] == ["start evaluation: 0/300"]


def test_work_with_a_mark_shows_it_and_an_upper_bound_of_the_time() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    table = LiveTable(console)
    table.update(Progress("warm start", 0, 1500, until="sampled_pass reaches 0.31"))
    time.sleep(0.05)
    for done in (10, 20):
        table.update(Progress("warm start", done, 1500, {"sampled_pass": 0.1}, "sampled_pass reaches 0.31"))

    console.print(table.bars.make_tasks_table(table.bars.tasks))

    shown = plain(console)
    assert re.search(r"20/1500 0:00:00 at most \d:\d\d:\d\d left", shown), shown
    assert "until sampled_pass reaches 0.31  sampled_pass 0.1" in shown
    assert str(Progress("warm start", 20, 1500, {}, "x reaches 1")) == "warm start: 20/1500 at most, until x reaches 1"


def test_a_failure_is_printed_once_after_earlier_lines() -> None:
    console = Console(file=io.StringIO(), width=160)
    news = iter([["start  policy v0"], [], [], [], []])
    phases, driver = logging.getLogger("rft_platform.phase"), logging.getLogger("rft_platform.run.driver")

    with showing_progress(console, lambda: next(news, [])) as screen:
        phases.error("rollout_batches of r0001 failed after 1.0 s: boom")
        driver.warning("r0001 explore: retry 1 of 3 in 3 s: boom")
        phases.error("rollout_batches of r0001 failed after 1.0 s: boom again")
        report("r0001 rollouts", 8, 8)
        phases.error("rollout_batches of r0001 failed after 1.0 s: the end")
        screen.take_back_failure()

    assert [line.split("  ", 1)[1] for line in console.file.getvalue().splitlines()] == [
        "start  policy v0",
        "warning: r0001 explore: retry 1 of 3 in 3 s: boom",
        "error: rollout_batches of r0001 failed after 1.0 s: boom again",
        "r0001 rollouts: 8/8",
    ]


def test_work_that_ends_early_is_removed_from_the_table_with_its_round() -> None:
    table = LiveTable(Console(file=io.StringIO(), force_terminal=True, width=120))

    table.update(Progress("warm start", 315, 1500))
    assert [row.description for row in table.bars.tasks] == ["warm start"]
    table.announce("start  held-out sampled 60%")

    assert table.bars.tasks == []


def test_no_log_handler_remains_afterwards() -> None:
    before = list(LOGGER.handlers)

    with showing_progress(Console(file=io.StringIO())):
        assert len(LOGGER.handlers) == len(before) + 1

    assert LOGGER.handlers == before
