"""What a project has reached: told by its notes, at a cost that lies with the open rounds."""

import os
from pathlib import Path

import pytest
import yaml

from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.experience.notes import RoundNotes
from rft_platform.experience.record import JudgedRow
from rft_platform.rounds.planning.plan import Action, LaunchState, plan_next
from rft_platform.rounds.planning.project_state import Failures, Launches, observe
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, RoundEvaluation, publish, withdraw, write
from rft_platform.rounds.project.record import read as read_record

ROUNDS = 6


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Five closed rounds, and a sixth that is explored and judged."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", "answer": "3"}\n')
    config = {
        "model": {"model_path": "unused"},
        "algorithm": {"repeat_times": 2},
        "buffer": {"batch_size": 2, "total_steps": 9, "explorer_input": {"taskset": {"path": str(tasks)}}},
    }
    home = Home(tmp_path / "home")
    write_text(home.config_file, yaml.safe_dump(config))
    opened = Project.open(home)
    for number in range(ROUNDS):
        publish(opened.store, Policy("f", policy_version=number, weights_digest="d", round=number))
        write(opened.store, number, Judged(sound=True))
        write(opened.store, number, RoundEvaluation())
    judged = [JudgedRow(f"{i}", "g", f"r{i}", 0, 1.0, {}, "v", 0.0) for i in range(4)]
    opened.store.write_judged(ROUNDS, "v", judged)
    write(opened.store, ROUNDS, Judged(sound=True))
    return opened


def test_closed_and_open_rounds(project: Project) -> None:
    state = observe(project, Launches())
    assert [round.sync.done for round in state.rounds] == [True] * 5 + [False]
    assert all(round.explore.done for round in state.rounds)
    assert state.warm_start == LaunchState(done=True)
    assert plan_next(state).actions == (Action("sync", ROUNDS, 0),)


@pytest.mark.parametrize(("part", "kind"), [(RoundEvaluation, "sync"), (Policy, "sync")])
@pytest.mark.parametrize("number", [1, 3])
def test_a_withdrawn_note_reopens_its_round(project: Project, part: type, kind: str, number: int) -> None:
    observe(project, Launches())  # whatever is remembered of it must not count
    withdraw(project.store, number, part)
    state = observe(project, Launches())
    assert [round.number for round in state.rounds if not round.sync.done] == [number, ROUNDS]
    assert [(action.kind, action.round) for action in plan_next(state).actions] == [(kind, number)]


def test_a_round_without_rows_is_explored_again(project: Project) -> None:
    for part in (Policy, Judged):
        withdraw(project.store, 2, part)
    assert plan_next(observe(project, Launches())).actions[0] == Action("explore", 2, 0)


def test_a_tick_reads_the_notes_of_open_rounds_only(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, str]] = []
    original = RoundNotes.read_note

    def recorded(self: RoundNotes, round: int, name: str) -> object:
        read.append((round, name))
        return original(self, round, name)

    monkeypatch.setattr(RoundNotes, "read_note", recorded)
    observe(project, Launches())
    assert read == [(ROUNDS, "judge")]


def test_launches_of_closed_rounds_are_included(project: Project) -> None:
    failed = Failures(2, "boom", retryable=False)
    launches = Launches(frozenset({("sync", 3)}), {("explore", 2): failed}, {("explore", 2): 5})
    state = observe(project, launches)
    assert state.rounds[2].sync.running and not state.rounds[2].explore.running
    assert (state.rounds[1].explore.failures, state.rounds[1].explore.ended) == (2, 5)


def test_a_closed_round_is_remembered_until_its_folder_changes(project: Project, monkeypatch) -> None:
    for number in range(1, ROUNDS):
        os.utime(project.store.round_folder(number), (1.0, 1.0))  # changed long ago
    asked: list[int] = []
    has_note = RoundNotes.has_note

    def counted(self: RoundNotes, number: int, name: str) -> bool:
        asked.append(number)
        return has_note(self, number, name)

    monkeypatch.setattr(RoundNotes, "has_note", counted)
    first = observe(project, Launches())
    assert {1, 2, 3, 4, 5} < set(asked)
    asked.clear()
    assert observe(project, Launches(), now=first.now) == first
    assert set(asked) <= {0, ROUNDS}
    read_record(project.store, 3).file(Policy).unlink()
    assert [state.sync.done for state in observe(project, Launches()).rounds] == [True, True, False, True, True, False]
