"""`rft forget` and imported traces: rows of a person or a trace are in no file afterwards, and stay away."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rft_platform.cli.commands.trace import print_checkpoint
from rft_platform.common.errors import UserError
from rft_platform.common.files import digest_file, write_sealed_json
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.experience.record import RolloutRow
from rft_platform.inference.canary import Canary
from rft_platform.rounds.judge import may_be_shown
from rft_platform.rounds.maintenance import forget_imports as forget_imports_module
from rft_platform.rounds.maintenance.forget_imports import Whose, forget_imports
from rft_platform.rounds.maintenance.row_erasure import TOMBSTONE
from rft_platform.rounds.offline import make_dataset, offline_lineage, required_dataset
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, publish, published, required, snapshot_of, write_snapshot
from rft_platform.rounds.reporting.lineage import rows_read, trace_checkpoint
from rft_platform.rounds.setup.demonstrations import WARM_START, write_demonstrations
from rft_platform.tasks.dataset import load_tasks
from rft_platform.traces.imports import Imports, read_jsonl
from rft_platform.traces.origins import dataset_origins
from tests.experience.samples import judged, rollouts
from tests.online.test_forget import files_with
from tests.support.records import selected
from tests.traces.test_imports import run
from tests.traces.test_readers import COUNT

HERS = f"{2:032x}"  # a trace of user-0: it asked whether order 0 left


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Project:
    """An offline training on imported demonstrations, whose dataset is written."""
    home = Home(tmp_path / "home")
    run(Imports(home), "langfuse")
    config = {
        "mode": "train",
        "model": {"model_path": str(tiny_model)},
        "algorithm": {"algorithm_type": "sft"},
        "buffer": {
            "train_batch_size": 4,
            "trainer_input": {"experience_buffer": {"path": str(home.imports / "demonstrations")}},
        },
    }
    project = Project(home, build_config(config))
    make_dataset(project, 1)
    publish(project.store, Policy("model", 3, "1" * 64, round=1))
    return project


def test_a_dataset_names_the_traces_of_its_rows(project: Project) -> None:
    origins = dataset_origins(Path(required_dataset(project, 1).path))
    assert {origin.id for origin in origins} == {f"{number:032x}" for number in range(COUNT) if number % 6 != 5}
    assert origins[0].link == f"/project/shop/traces/{0:032x}"
    assert "user-" not in str(origins), "lineage does not name people"


def test_a_trace_of_weights_prints_ids_and_links(project: Project) -> None:
    dataset = required_dataset(project, 1)
    manifest = {
        "policy_version": 3, "parent": "base", "parent_version": 0, "weights_digest": "w",
        "lineage": offline_lineage(project, dataset, "run"),
    }  # fmt: skip
    write_sealed_json(project.checkpoints / "global_step_3" / "manifest.json", manifest)
    found, said = trace_checkpoint(project.checkpoints / "global_step_3", project.store), StringIO()
    print_checkpoint(found, Console(file=said, width=200))
    lines = said.getvalue().splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("  imported from"))
    assert lines[first].split() == ["imported", "from", "15", "traces"]
    assert lines[first + 1].split() == ["langfuse", f"{0:032x}", f"/project/shop/traces/{0:032x}"]
    assert lines[first + 11].strip() == "and 5 more (--all shows them)"
    print_checkpoint(found, Console(file=said, width=200), every_trace=True)
    assert said.getvalue().count("langfuse ") == 10 + 15


def test_nothing_of_a_forgotten_person_is_in_any_file(project: Project) -> None:
    home = project.home
    assert files_with(home.root, "order 0 left")
    found = forget_imports(home, project, None, Whose("user-0"))
    assert found is not None
    assert found.rounds == (1,)
    # of user-0: four traces in three tasks, as many demonstrations in the import and in the dataset, and a pair
    assert found.rows == 3 + 4 + 1 + 4
    for text in ("user-0", "order 0 left", "Order 0 arrives", "In 0 days", HERS):
        assert files_with(home.root, text) == [], text
    assert files_with(home.root, "user-1")


def test_a_trained_dataset_stays_sound_and_names_the_other_traces(project: Project) -> None:
    lineage = {"round": 1, "dataset": "sft_dataset.parquet", "dataset_rows": 15}
    before = required_dataset(project, 1)
    lineage |= {"dataset_sha256": before.sha256, "data_digest": before.digest}
    forget_imports(project.home, project, None, Whose(trace_ids=frozenset({HERS})))
    after = required_dataset(project, 1)
    assert (after.erased, after.digest, after.rows) == (1, before.digest, before.rows)
    assert make_dataset(project, 1) == after, "the training is over: its dataset is not made anew"
    assert rows_read(lineage, project.store, verify=True)["data_unchanged"] is True
    assert HERS not in {origin.id for origin in dataset_origins(Path(after.path))}


def test_a_canary_holds_no_rows_after_a_kill_and_a_repetition(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each step of an erasure of a dataset, and repeated."""
    policy = required(project.store, 1)
    publish(project.store, replace(policy, canary=Canary([[1, 2]], [[0.0, 0.0]])))
    for name in ("drop_canaries", "digest_file", "write", "descendants_of"):
        with monkeypatch.context() as patched:
            patched.setattr(forget_imports_module, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                forget_imports(project.home, project, None, Whose("user-0"))
    assert forget_imports(project.home, project, None, Whose("user-0")) is not None
    assert required(project.store, 1).canary is None
    dataset = required_dataset(project, 1)
    assert dataset.erased == 4 and dataset.sha256 == digest_file(Path(dataset.path))


def test_a_dataset_that_no_training_used_is_made_without_the_traces(project: Project) -> None:
    publish(project.store, replace(published(project.store, 1), round=2))  # type: ignore[type-var]
    (project.store.round_folder(1) / "policy-policy.json").unlink()
    forget_imports(project.home, project, None, Whose("user-1"))
    made = make_dataset(project, 1)
    assert (made.rows, made.erased) == (15 - 4, 0)


def test_a_repeated_import_leaves_forgotten_traces_out(project: Project) -> None:
    imports = Imports(project.home)
    forget_imports(project.home, project, None, Whose("user-0", frozenset({f"{10:032x}"})))
    again = run(imports, "langfuse")
    assert (again.imported, again.forgotten) == (COUNT - 5, 5)
    assert files_with(project.home.root, "order 0 left") == []
    without_subjects = run(imports, "langfuse-traces", format="langfuse", name="other")
    assert without_subjects.forgotten == 5, "known by their ids, too"


def test_a_trace_of_a_removed_task_is_still_found(tmp_path: Path) -> None:
    imports = Imports(Home(tmp_path / "home"))
    run(imports)
    ids = [entry["id"] for row in read_jsonl(imports.file("tasks", "langsmith")) for entry in row["imported_from"]]
    found = forget_imports(Home(tmp_path / "home"), None, None, Whose(trace_ids=frozenset(ids[:1])))
    assert found is not None
    assert found.rows == 3, "the task of two traces, a pair and a demonstration"
    again = run(imports, name="again")
    assert (again.imported, again.forgotten, again.known) == (0, 1, {"langsmith": COUNT - 1})


def test_forget_can_be_repeated_and_names_unknown_traces(project: Project) -> None:
    forget_imports(project.home, project, None, Whose("user-0"))
    again = forget_imports(project.home, project, None, Whose("user-0"))
    assert again is not None and again.rows == 0
    assert forget_imports(project.home, project, None, Whose("nobody")) is None


def test_demonstrations_of_a_warm_start_are_erased(project: Project, tiny_model: Path) -> None:
    folder = project.home.imports / "demonstrations"
    config = build_config({"model": {"model_path": str(tiny_model)}, "warm_start": {"path": str(folder)}})
    assert config.warm_start is not None
    target = project.store.round_folder(0) / WARM_START
    write_demonstrations(config.warm_start, target)
    assert len(dataset_origins(target)) == 15
    forget_imports(project.home, project, None, Whose("user-2"))
    assert len(dataset_origins(target)) == 11
    assert files_with(project.home.root, "user-2") == []


def test_rollouts_of_imported_tasks(tmp_path: Path, tiny_model: Path) -> None:
    """Lineage leads from weights to the traces of the tasks; forgotten ones are tombstones in the rounds."""
    home = Home(tmp_path / "home")
    run(Imports(home), "langfuse")
    tasks = load_tasks(str(home.imports / "tasks"), response_key=None).tasks
    hers = next(task for task in tasks if task.prompt == "Did order 0 leave?")
    others = [task for task in tasks if "user-0" not in str(task.raw)]
    config = build_config(
        {
            "model": {"model_path": str(tiny_model)},
            "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
            "buffer": {"explorer_input": {"taskset": {"path": str(home.imports / "tasks"), "judge": "a:b"}}},
        }
    )
    project, texts = Project(home, config), [{"role": "user", "content": hers.prompt}]
    rows = [row for index, task in enumerate([hers, *others[:2]]) for row in rollouts_of(index, task.task_id, texts)]
    assert not may_be_shown(project), "Dagster's event log cannot be erased"
    project.store.write_rollouts(1, 0, rows)
    of_her, *of_others = judged(rows)
    project.store.write_judged(
        1, "exact@1", [replace(of_her, judge_error="KeyError: 'order 0' (judge.py:5)"), *of_others]
    )
    canary = Canary([[1, 2]], [[0.0, 0.0]])
    start = Policy("model", 0, "0" * 64, round=0, canary=canary)
    write_snapshot(project.store, 1, start)
    for number in (0, 1):  # round 1 trained nothing
        publish(project.store, replace(start, round=number))
    manifest = {
        "policy_version": 8, "parent": "base", "parent_version": 0, "weights_digest": "w",
        "lineage": selected(project.store, 1, "exact@1") | {"project": config.project, "name": config.name},
    }  # fmt: skip
    write_sealed_json(project.checkpoints / "global_step_8" / "manifest.json", manifest)
    (training,) = trace_checkpoint(project.checkpoints / "global_step_8", project.store).trainings
    expected = {entry["id"] for task in (hers, *others[:2]) for entry in task.raw["imported_from"]}
    assert {origin.id for origin in training.imported} == expected

    found = forget_imports(home, project, None, Whose("user-0"))
    assert found is not None
    assert [ref.policy_version for ref in found.trained] == [8]
    stored = project.store.rollout_rows(1)
    assert [row.call.finish_reason == TOMBSTONE for row in stored] == [True, True, False, False, False, False]
    assert [row.judge_error for row in project.store.judged_rows(1)] == [None] * len(rows)
    copies = [*(required(project.store, number) for number in (0, 1)), snapshot_of(project.store, 1)]
    assert [policy.canary for policy in copies] == [None] * 3


def rollouts_of(index: int, task_id: str, messages: list[dict[str, str]]) -> list[RolloutRow]:
    """Two runs of a task; only those of the first have these messages."""
    texts = {"messages": messages} if index == 0 else {}
    return [replace(row, task_id=task_id) for row in rollouts(index + 1, 2, **texts)[-2:]]


def test_a_home_without_a_project(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert forget_imports(home, None, None, Whose("user-0")) is None
    run(Imports(home))
    found = forget_imports(home, None, None, Whose("user-0"))
    assert found is not None and found.rows == 8
    assert "user-0" not in json.dumps([file.read_text() for file in home.imports.rglob("*.json*")])
    with pytest.raises(UserError, match="no import"):
        Imports(home).report("absent")
