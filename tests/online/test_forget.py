"""`rft forget`: a person's text and tokens are in no file afterwards; what was trained on them is named."""

import hashlib
import json
import sqlite3
import stat
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from rft_platform.common import sqlite_files
from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import write_sealed_json
from rft_platform.common.sqlite_files import compact
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.experience.integrity import DamagedFile
from rft_platform.experience.maintenance import retire_round, sweep_round
from rft_platform.inference.canary import Canary
from rft_platform.model_registry.models import ModelRegistry
from rft_platform.online import forget as online_forget
from rft_platform.online.forget import forget
from rft_platform.online.project import project_in
from rft_platform.online.traffic.database import CONSUMED, FORGOTTEN, RECORDED
from rft_platform.online.traffic.erasure import TrafficErasure
from rft_platform.online.traffic.incoming import ENGINE, TEMPLATE_HASH, NewCall, NewFeedback
from rft_platform.online.traffic.preferences import Preference, PreferenceStore
from rft_platform.online.traffic.project_traffic import traffic_database, traffic_store
from rft_platform.rounds.explore import collect
from rft_platform.rounds.judge import judge
from rft_platform.rounds.maintenance import row_erasure
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    Policy,
    publish,
    published,
    read,
    required,
    set_aside,
    snapshot_of,
    write_snapshot,
)
from rft_platform.rounds.reporting.run_log import log_round_traces
from tests.support.records import selected

SECRET, OTHER = "Ann's landlady is Mrs Quillfeather", "Bob asks for a refund"
TOKENS = {"ann": [401, 402, 403], "bob": [301, 302]}


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Project:
    """A project with one collected and judged round of two people's calls, whose policy is published."""
    config = build_config(
        {
            "model": {"model_path": str(tiny_model), "max_model_len": 64},
            "algorithm": {"algorithm_type": "reinforce++"},
            "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}},
        }
    )
    project = project_in(Home(tmp_path / "home"), config)
    publish(project.store, Policy("model", 0, "0" * 64, round=0))
    traffic = traffic_store(project)
    for number in range(4):
        traffic.record([call(number, "ann" if number % 2 else "bob")])
        name = f"ticket of {'ann' if number % 2 else 'bob'} {number}"
        said = NewFeedback(name, [f"m{number}"], number / 4, comment=SECRET if number % 2 else OTHER)
        traffic.give_feedback(said)
    traffic.commit()
    collect(project, 1)
    judge(project, 1)
    sequences = [TOKENS["bob"], TOKENS["ann"]]
    publish(
        project.store, Policy("model", 1, "1" * 64, 1, Canary(sequences, [[0.0] * len(each) for each in sequences]))
    )
    traffic.record([call(9, "ann")])  # not labelled yet
    return project


def call(number: int, subject: str) -> NewCall:
    text, tokens = (SECRET, TOKENS["ann"]) if subject == "ann" else (OTHER, TOKENS["bob"])
    recorded: dict[str, Any] = {
        "msg_id": f"m{number}", "prompt_ids": tokens[:-1], "response_ids": tokens[-1:], "rollout_logprobs": [-0.5],
        "finish_reason": "stop", "temperature": 1.0, "top_p": 1.0, "top_k": -1, "tools": [], "policy_version": 0,
        "messages": [{"role": "user", "content": text}], "response": {"role": "assistant", "content": text[::-1]},
        ENGINE: "transformers", TEMPLATE_HASH: "t",
    }  # fmt: skip
    return NewCall(
        f"m{number}",
        0,
        recorded,
        policy_version=0,
        tokens=3,
        recorded_at=time.time(),
        subject=subject,
        conversation="c",
        task_id=f"order of {subject}",
        run_id=f"{subject}-{number}",
    )


def files_with(folder: Path, text: str) -> list[Path]:
    """Files below a folder that hold a text or its mirror image, which is the answer to it. Parquet files are read."""
    import pyarrow.parquet as pq

    found = []
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        content = file.read_bytes()
        if file.suffix == ".parquet":
            content += json.dumps(pq.read_table(file).to_pylist(), default=str).encode()
        for needle in (text, json.dumps(text)[1:-1], text[::-1]):
            if needle.encode() in content:
                found.append(file)
                break
    return found


def test_nothing_of_a_forgotten_person_is_in_any_file(project: Project) -> None:
    rows = [replace(row, judge_error=SECRET if "ann" in row.run_id else OTHER) for row in project.store.judged_rows(1)]
    project.store.write_judged(1, rows[0].judge_version, rows)
    assert files_with(project.home.root / "rounds", SECRET)
    found = forget(project, None, "ann")
    assert (found.rows, found.rounds, found.trained) == (3, (1,), ())
    assert files_with(project.home.root, SECRET) == []
    assert files_with(project.home.root, OTHER)
    stored = project.store.rollout_rows(1)
    assert len(stored) == 4
    tokens = {row.call.msg_id: [*row.call.prompt_ids, *row.call.response_ids] for row in stored}
    assert tokens == {"m0": TOKENS["bob"], "m1": [0, 0], "m2": TOKENS["bob"], "m3": [0, 0]}
    assert [any(row.loss_mask) for row in stored] == [True, False, True, False]
    policy = published(project.store, 1)
    assert policy is not None and policy.canary is None


def test_damaged_files_that_were_set_aside_are_deleted(project: Project) -> None:
    damaged = project.store.rollout_files(1)[0]
    content = damaged.read_bytes()
    set_aside(project.store, 1, DamagedFile(damaged, "was changed"))
    collect(project, 1)
    judge(project, 1)
    moved = project.store.round_folder(1) / "aside" / damaged.name
    assert moved.read_bytes() == content and moved in files_with(project.home.root, SECRET)
    forget(project, None, "ann")
    assert files_with(project.home.root, SECRET) == []
    assert not moved.exists() and moved.with_name(moved.name + ".why.json").exists()


def test_canaries_of_all_policies_of_the_round_and_their_copies_are_removed(project: Project) -> None:
    policy = required(project.store, 1)
    publish(project.store, replace(policy, name="helper", weights_digest="2" * 64))
    publish(project.store, replace(policy, round=2))  # round 2 trained nothing
    publish(project.store, replace(policy, round=3, weights_digest="3" * 64))
    write_snapshot(project.store, 2, policy)
    forget(project, None, "ann")
    found = [required(project.store, 1, "helper"), required(project.store, 2), snapshot_of(project.store, 2)]
    assert [each.canary for each in found] == [None] * 3
    assert required(project.store, 3).canary == policy.canary, "made of rows of another round"


def test_a_canary_holds_no_tokens_after_a_kill_and_a_repetition(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each change of a file: as long as any row is left, its canary is gone."""
    for name in ("_rewrite", "delete_superseded", "one_per_judgement"):
        with monkeypatch.context() as patched:
            module = online_forget if name == "one_per_judgement" else row_erasure
            patched.setattr(module, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                forget(project, None, "ann")
        assert required(project.store, 1).canary is None
    assert forget(project, None, "ann").rows == 3
    assert files_with(project.home.root, SECRET) == []


def test_the_canary_of_a_retired_round_is_removed(project: Project) -> None:
    retire_round(project.store, 1)
    sweep_round(project.store, 1, grace_s=0)
    assert forget(project, None, "ann").rounds == (1,)
    assert required(project.store, 1).canary is None


def test_a_trained_round_whose_rollouts_were_set_aside(project: Project) -> None:
    """The judgements still name the weights that were trained on the rows, also when the command is repeated."""
    folder = project.checkpoints / "global_step_1"
    folder.mkdir(parents=True)
    manifest = {
        "files": {}, "parent": "base", "parent_version": 0, "policy_version": 1, "weights_digest": "1" * 64,
        "lineage": selected(project.store, 1, project.store.judge_version(1) or ""),
    }  # fmt: skip
    write_sealed_json(folder / "manifest.json", manifest)
    set_aside(project.store, 1, DamagedFile(project.store.rollout_files(1)[0], "was changed"))
    for _ in range(2):
        found = forget(project, None, "ann")
        assert (found.rows, found.rounds, [ref.checkpoint for ref in found.trained]) == (3, (1,), [str(folder)])
        assert required(project.store, 1).canary is None
        for text in (SECRET, "order of ann", "ticket of ann"):
            assert files_with(project.home.root, text) == []


def test_rows_stay_as_tombstones_and_the_round_stays_sound(project: Project) -> None:
    before = project.store.digest(1)
    forget(project, None, "ann")
    assert project.store.digest(1) == before
    assert project.store.damaged(1, digest=True) == []
    calls = {each.msg_id: each for each in traffic_store(project).calls(["m0", "m1", "m9"])}
    assert {name: each.state for name, each in calls.items()} == {"m0": CONSUMED, "m1": FORGOTTEN, "m9": FORGOTTEN}
    assert judge(project, 1).sound
    assert [event.kind for event in traffic_store(project).events()] == ["forgotten"]


def test_forget_can_be_repeated_and_names_an_unknown_person(project: Project) -> None:
    forget(project, None, "ann")
    assert forget(project, None, "ann").rows == 3
    with pytest.raises(UserError, match="no recorded call names the subject 'eve'"):
        forget(project, None, "eve")


def test_no_name_that_a_client_gave_is_left(project: Project) -> None:
    """The database holds digests that nobody can guess without the key, which lies in the home."""
    raters = PreferenceStore(traffic_database(project))
    with traffic_database(project).begin() as connection:
        for left, right in ((1, 3), (2, 4)):  # bob's calls, and ann's
            pair = {"at": 0.0, "left_call": left, "right_call": right, "picked": "tie", "rater": "ann's clerk"}
            connection.execute(insert(Preference).values(pair))
    groups = [row.group_id for row in project.store.rollout_rows(1)]
    names = ("ann", "order of ann", "ann-1", "ticket of ann")
    assert raters.decided() == 2 and all(files_with(project.home.root, name) for name in names[1:])
    forget(project, None, "ann")
    calls = traffic_store(project).calls(["m0", "m1", "m3", "m9"])
    assert [call.subject for call in calls[1:]] == [calls[1].subject] * 3
    with closing(sqlite3.connect(project.home.root / "online" / "traffic.db")) as database:
        given = {name for (name,) in database.execute("select feedback_id from feedback_calls")}
        assert given == {name for (name,) in database.execute("select feedback_id from feedback")}
        rated = [rater for (rater,) in database.execute("select rater from preferences order by number")]
    assert len(given) == 4 and sum("ticket of bob" in name for name in given) == 2
    assert rated == ["ann's clerk", None]
    for name in names[1:]:
        assert files_with(project.home.root, name) == []
        digest = hashlib.sha256(name.encode()).hexdigest()
        assert files_with(project.home.root, digest) == []
    assert files_with(project.home.root, hashlib.sha256(b"ann").hexdigest()) == []
    key = project.home.root / "online" / "forget_key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert files_with(project.home.root, key.read_text()) == [key]
    after = [row.group_id for row in project.store.rollout_rows(1)]
    assert [groups.index(group) for group in groups] == [after.index(group) for group in after], "equal groups"


def test_the_comments_of_a_person_who_only_compared_answers_are_erased(project: Project) -> None:
    with traffic_database(project).begin() as connection:
        for left, right, rater, comment in ((1, 3, "eve", SECRET), (2, 4, "bob's clerk", OTHER)):
            pair = {"at": 0.0, "left_call": left, "right_call": right, "picked": "left"}
            connection.execute(insert(Preference).values(**pair, rater=rater, comment=comment))
    with pytest.raises(UserError, match="no recorded call of tenant 'b' names the subject 'eve', and no preference"):
        forget(project, None, "eve", "b")
    found = forget(project, None, "eve")
    assert (found.rows, found.rounds) == (0, ())
    with traffic_database(project).connect() as connection:
        kept = connection.exec_driver_sql("SELECT rater, comment, picked FROM preferences ORDER BY number").all()
    assert [tuple(each) for each in kept] == [(None, None, "left"), ("bob's clerk", OTHER, "left")]


def test_a_rater_of_several_tenants_is_forgotten_by_tenant(project: Project) -> None:
    traffic = traffic_store(project)
    traffic.record([replace(call(number, "bob"), tenant="b") for number in (21, 22)])
    left, right = (each.number for each in traffic.calls(["m21", "m22"]))
    with traffic_database(project).begin() as connection:
        for pair in ((1, 3), (left, right)):
            row = {"at": 0.0, "left_call": pair[0], "right_call": pair[1], "picked": "tie", "rater": "eve"}
            connection.execute(insert(Preference).values(**row, comment=OTHER))
    with pytest.raises(UserError, match=r"preferences of the tenants '', 'b' name the subject 'eve'.* --tenant"):
        forget(project, None, "eve")
    forget(project, None, "eve", "b")
    with traffic_database(project).connect() as connection:
        kept = connection.exec_driver_sql("SELECT rater, comment FROM preferences ORDER BY number").all()
    assert [tuple(each) for each in kept] == [("eve", OTHER), (None, None)]


def test_a_crash_before_the_last_step_is_repeated(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(TrafficErasure, "forget_names", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            forget(project, None, "ann")
    assert forget(project, None, "ann").rows == 3
    assert files_with(project.home.root, "order of ann") == []


def test_a_subject_of_several_tenants_is_forgotten_by_tenant(project: Project) -> None:
    traffic = traffic_store(project)
    traffic.record([replace(call(11, "ann"), tenant="b")])
    with pytest.raises(UserError, match=r"tenants '', 'b' name the subject 'ann'.* --tenant"):
        forget(project, None, "ann")
    with pytest.raises(UserError, match="no recorded call of tenant 'c' names the subject 'ann'"):
        forget(project, None, "ann", "c")
    assert forget(project, None, "ann", "b").rows == 1
    states = {each.msg_id: each.state for each in traffic.calls(["m1", "m9", "m11"])}
    assert states == {"m1": CONSUMED, "m9": RECORDED, "m11": FORGOTTEN}
    assert forget(project, None, "ann", "").rows == 3


def test_rows_that_a_round_collects_now_are_not_forgotten(project: Project) -> None:
    traffic = traffic_store(project)
    traffic.give_feedback(NewFeedback("f9", ["m9"], 1.0))
    traffic.commit()
    traffic.settle(2)
    with pytest.raises(UserError, match="round 2 collects rows of this subject"):
        forget(project, None, "ann")
    assert files_with(project.home.root, SECRET)


def test_a_home_that_starts_again_does_not_train_on_rows_that_were_consumed_before(project: Project) -> None:
    url = f"sqlite:///{project.home.root / 'online' / 'traffic.db'}"
    config = project.config.model_dump(exclude_unset=True)
    config["buffer"]["trainer_input"]["experience_buffer"]["path"] = url
    fresh = project_in(Home(project.home.root.parent / "fresh"), build_config(config))
    publish(fresh.store, Policy("model", 0, "0" * 64, round=0))
    with pytest.raises(StorageError, match="has given its rows of r0001 to another home"):
        collect(fresh, 1)
    assert collect(project, 1).rows == 4  # repeated after a crash: the same rows


def test_forget_names_versions_in_checkpoint_root_dir(project: Project, tmp_path: Path) -> None:
    elsewhere = project.config.model_copy(update={"checkpoint_root_dir": str(tmp_path / "shared")})
    moved = project_in(project.home, elsewhere)
    folder = moved.checkpoints / "global_step_1"
    folder.mkdir(parents=True)
    lineage = selected(project.store, 1, project.store.judge_version(1) or "")
    manifest = {
        "files": {},
        "parent": str(tmp_path),
        "policy_version": 1,
        "parent_version": 0,
        "weights_digest": "1" * 64,
    }
    write_sealed_json(folder / "manifest.json", {**manifest, "lineage": lineage})
    assert [ref.checkpoint for ref in forget(moved, None, "ann").trained] == [str(folder)]


@pytest.mark.slow
def test_the_feedback_of_a_forgotten_person_is_removed_from_mlflow(
    project: Project, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = project.home
    home.mlflow.mkdir()
    database = home.mlflow / "mlflow.db"
    database.write_bytes(empty_store.read_bytes())
    monitor = project.config.monitor.model_copy(update={"traces": 9})
    traced = project_in(home, project.config.model_copy(update={"monitor": monitor}))
    registry = ModelRegistry(f"sqlite:///{database}", home.mlflow / "artifacts", "rft", "model")
    assert log_round_traces(traced, registry, read(traced.store, 1)) == 4
    assert log_round_traces(traced, registry, read(traced.store, 1)) == 4, "a repeated stage adds none"
    run = registry.training_run(traced.config.name)
    experiment = run.client.get_run(run.run_id).info.experiment_id
    traces = run.client.search_traces(locations=[experiment])
    said = {
        (each.name, each.value, each.rationale, str(each.source.source_type))
        for trace in traces
        for each in trace.info.assessments
        if each.source.source_id == "user"
    }
    assert said == {("reward", number / 4, SECRET if number % 2 else OTHER, "HUMAN") for number in range(4)}
    spans = [span for trace in traces for span in trace.data.spans]
    assert {span.attributes["msg_id"] for span in spans if span.parent_id} == {f"m{number}" for number in range(4)}
    assert all(span.inputs is None and span.outputs is None for span in spans), "MLflow gets no messages"
    assert files_with(home.mlflow, SECRET) == [database]
    forget(traced, registry, "ann")
    assert files_with(home.root, SECRET) == []
    assert files_with(home.mlflow, OTHER) == [database, database.with_name("mlflow.db.backup")]
    assert len(run.client.search_traces(locations=[experiment])) == 2
    monkeypatch.setattr(sqlite_files, "_BUSY_S", 0.1)
    with pytest.raises(StorageError, match="still holds deleted text"):
        reading_while(database, lambda: compact(f"sqlite:///{database}"))


def reading_while(database: Path, work: Callable[[], None]) -> None:
    """Do ``work`` while another connection writes to the database."""
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        work()
