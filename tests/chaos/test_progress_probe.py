"""Where a project stands, read from its files."""

from pathlib import Path

import pytest

from chaos.progress_probe import PointWatch, Progress, current_progress, progress_mark
from rft_platform.common.files import temporary_path, write_json
from rft_platform.config.home import Home
from rft_platform.experience.file_names import round_key


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def note(home: Home, number: int, *names: str) -> None:
    for name in names:
        write_json(home.rounds / round_key(number) / f"{name}.json", {})


def test_the_phase_follows_from_the_notes(home):
    assert current_progress(home) == Progress(-1, "start")
    (home.rounds / "r0000").mkdir(parents=True)
    assert current_progress(home).phase == "warm start"
    note(home, 0, "policy-policy", "evaluation")
    assert current_progress(home) == Progress(0, "between")
    phases = []
    for name in ("snapshot-policy", "explore", "judge", "policy-policy", "evaluation"):
        note(home, 1, name)
        phases.append(current_progress(home).phase)
    assert phases == ["rollouts", "judging", "training", "evaluation", "between"]


def test_positions_and_marks_grow_with_the_notes(home):
    seen = [(current_progress(home).position, progress_mark(home))]
    names = ("snapshot-policy", "explore", "judge", "train-policy", "policy-policy", "evaluation")
    for number in (0, 1, 2):
        for name in names[0 if number else 4 :]:
            note(home, number, name)
            seen.append((current_progress(home).position, progress_mark(home)))
    assert seen == sorted(seen)
    assert len({mark for _, mark in seen}) == len(seen)


def test_a_watch_waits_for_the_next_time_and_takes_what_has_passed(home):
    note(home, 1, "snapshot-policy", "explore")
    watch = PointWatch(home, home.checkpoints, "judging")  # round 1 is at it already: the next time is in round 2
    note(home, 1, "judge", "policy-policy")
    assert not watch.reached()
    note(home, 2, "snapshot-policy")
    assert not watch.reached()
    note(home, 2, "explore", "judge")  # too fast to be seen
    assert watch.reached()


def test_a_checkpoint_that_is_being_written_is_seen(home):
    note(home, 1, "snapshot-policy", "explore", "judge")
    watch = PointWatch(home, home.checkpoints, "checkpoint")
    assert not watch.reached()
    temporary_path(home.checkpoints / "global_step_2").mkdir(parents=True)
    assert watch.reached()
