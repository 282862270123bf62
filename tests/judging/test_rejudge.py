"""Old rollouts under another judge: a backfill of judge_job over rounds, the same from the shell, and its pairs."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from typer.testing import CliRunner

from rft_platform.assets import round_lock
from rft_platform.cli.main import app
from rft_platform.common.errors import UserError
from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.config.load import build_config, dump_config
from rft_platform.config.schema.buffer import Taskset
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.experience.record import RolloutRow
from rft_platform.jobs.instance import open_instance
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import TasksetJudge
from rft_platform.judging.judge_context import BudgetSpentError
from rft_platform.rounds.judge import _kind_of, judge, restore
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Explored, Trained, read, write
from rft_platform.rounds.setup.taskset_binding import OtherJudge, check_judge, judge_spec, other_judge
from rft_platform.run.project_checks import check_may_start
from rft_platform.run.start import write_config

from .conftest import JudgeServer, a_row

TASKS = [{"question": "1+1", "answer": "2"}, {"question": "1+2", "answer": "3"}]
ANSWERS = ["2", "2.3", "3.04", "x"]
RUN = CliRunner().invoke


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Two rounds of two tasks with four runs each, judged by ``exact_match``."""
    home = Home(tmp_path / ".rft")  # the default, wherever the definitions were first imported
    monkeypatch.setenv("RFT_HOME", str(home.root))
    monkeypatch.setenv("DAGSTER_HOME", str(home.dagster))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    config = build_config(
        {
            "project": "sums",
            "model": {"model_path": "model"},
            "algorithm": {"repeat_times": 4},
            "buffer": {"batch_size": 2, "total_steps": 2, "explorer_input": {"taskset": {"path": str(file)}}},
        }
    )
    home.root.mkdir()
    home.config_file.write_text(dump_config(config))
    opened = Project.open(home)
    for number in (1, 2):
        opened.store.write_rollouts(number, 0, rollouts(opened, number))
        write(opened.store, number, Explored(rows=8))
        assert judge(opened, number).sound
    held: dict[Path, Any] = {}
    monkeypatch.setattr(round_lock, "_round_locks", held)
    yield opened
    for each in held.values():
        each.stream.close()


def rollouts(project: Project, number: int) -> list[RolloutRow]:
    return [
        replace(
            a_row(f"{number}-{task.task_id}-{run}", 0, text, group=f"{number}-{task.task_id}", task=task.task_id),
            round=number,
        )
        for task in project.tasks.tasks
        for run, text in enumerate(ANSWERS)
    ]


def mean_rewards(project: Project, number: int) -> dict[str, float]:
    """Mean reward of each judgement of a round, those in the order of their making."""
    found = {version: project.store.judged_rows(number, version) for version in project.store.judge_versions(number)}
    return {version: sum(row.reward for row in rows) / len(rows) for version, rows in found.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:InitResourceContext.dagster_run is deprecated")  # Dagster's own use of it
def test_a_backfill_judges_rounds_again_and_keeps_old_judgements(project: Project) -> None:
    from rft_platform.definitions import defs

    before = {number: project.store.judge_version(number) for number in (1, 2)}
    assert set(mean_rewards(project, 1).values()) == {1 / 8}
    asset = {"judge": "numeric", "judge_args": {"tolerance": 0.5}}
    together = {"dagster/backfill": "again"}
    with open_instance(project.home) as instance:
        instance.add_dynamic_partitions("rft_round", ["r0001", "r0002"])
        for key in ("r0001", "r0002"):
            done = defs.resolve_job_def("judge_job").execute_in_process(
                instance=instance,
                partition_key=key,
                run_config={"ops": {"judged_experiences": {"config": asset}}},
                tags=together,
            )
            assert done.success
        runs = instance.get_runs(dg.RunsFilter(job_name="judge_job", tags=together))
        assert {run.tags["dagster/partition"] for run in runs} == {"r0001", "r0002"}
        (event,) = instance.fetch_materializations(
            dg.AssetRecordsFilter(asset_key=dg.AssetKey("judged_experiences"), asset_partitions=["r0002"]), limit=1
        ).records
        assert event.asset_materialization is not None
        told: Any = event.asset_materialization.metadata["judge_versions"].value
    for number in (1, 2):
        now = project.store.judge_version(number)
        rewards = mean_rewards(project, number)
        assert now is not None and set(rewards) == {before[number], now} and now != before[number]
        assert rewards[now] == 3 / 8  # 2 and 2.3 of the first task, 3.04 of the second
    assert [record.data["in_force"] for record in told.records].count(True) == 1 and len(told.records) == 2


@pytest.mark.slow
def test_the_command_judges_with_a_model_and_stores_its_answers(project: Project, endpoint: JudgeServer) -> None:
    args = json.dumps({"model": endpoint.model, "criteria": {"quality": "length"}, "backoff_s": 0.01, "retries": 1})
    said = RUN(app, ["judge", "--rounds", "1-2", "--judge", "llm", "--args", args, "--json"])
    assert said.exit_code == 0, said.output
    first, second = json.loads(said.stdout)
    assert (first["round"], first["judge_calls"], first["judge_cached"]) == (1, 8, 0)
    assert (second["round"], second["judge_calls"], second["judge_cached"]) == (2, 0, 8)  # the same answers again
    assert first["judge_version"] == second["judge_version"]
    assert read(project.store, 2).judged.figures["judge_tokens"] == 0
    parts = {name for row in project.store.judged_rows(1) for name in row.reward_parts}
    assert {"llm", "llm/quality"} <= parts
    with open_instance(project.home) as instance:
        assert len(instance.get_runs(dg.RunsFilter(job_name="judge_job"))) == 2

    endpoint.failures = [500] * 99
    other = json.dumps({"model": endpoint.model, "criteria": {"tone": "tone"}, "backoff_s": 0.01, "retries": 1})
    failed = RUN(app, ["judge", "--rounds", "1", "--judge", "llm", "--args", other])
    assert failed.exit_code == 1 and "gave no valid answer in 2 attempts" in failed.output
    assert project.store.judge_version(1) == first["judge_version"]  # nothing was judged, nothing replaced

    pairs = RUN(app, ["judge", "--rounds", "1-2", "--pairs", "pairs.jsonl", "--json"])
    assert pairs.exit_code == 0, pairs.output
    assert json.loads(pairs.stdout)[0]["pairs"] == 4
    chosen = [json.loads(line)["chosen"][0]["content"] for line in Path("pairs.jsonl").read_text().splitlines()]
    assert chosen == ["3.04"] * 4  # the longest


def test_the_judge_of_a_run_configuration() -> None:
    assert other_judge("", {}, []) is None
    assert other_judge("numeric", {"tolerance": 1}, []) == OtherJudge("numeric", {"tolerance": 1})
    weighted = other_judge("", {}, [{"judge": "numeric", "weight": 2}, {"judge": "tags", "args": {"alone": False}}])
    taskset = Taskset(path="tasks.jsonl")
    spec = judge_spec(taskset, weighted)
    assert spec is not None and [(part.name, part.weight) for part in spec.parts] == [("numeric", 2.0), ("tags", 1.0)]
    for given, told in (
        (("numeric", {}, [{"judge": "tags"}]), "not both"),
        (("", {}, [{"name": "tags"}]), "expected a list of {judge, weight, args}"),
    ):
        with pytest.raises(UserError, match=told):
            other_judge(*given)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rounds", "3-1"], "expected a round, a range or several of them"),
        (["--rounds", "7"], "--rounds '7': expected rounds up to the newest one, r0002; see `rft rounds`"),
        (["--rounds", "5,7-99"], "expected rounds up to the newest one, r0002"),
        (["--rounds", "1", "--judge", "numeric", "--args", "tolerance: 1"], "expected JSON"),
        (["--rounds", "1", "--judge", "nomeric"], "did you mean 'numeric'"),
        (["--rounds", "1", "--args", '{"tolerance": 1}'], "without a judge"),
        (["--rounds", "1", "--pairs", "pairs.txt"], "expected a .jsonl or .parquet file"),
        (["--rounds", "1", "--pairs", "pairs.jsonl", "--judge", "numeric"], "leave out --judge, --args, --restore"),
        (["--rounds", "1", "--pairs", "pairs.jsonl", "--restore", "feed"], "leave out --judge, --args, --restore"),
        (["--rounds", "1-2000000"], "--rounds '1-2000000': expected rounds up to the newest one, r0002"),
        (["--rounds", "²"], "--rounds '²': expected a round, a range or several of them"),
        (["--rounds", "1-2-3"], "expected a round, a range or several of them"),
        (["--rounds", "9" * 5000], "expected a round, a range or several of them"),
        (["--rounds", "1", "--all-pairs"], "give --pairs, too"),
        (["--rounds", "1", "--margin", "0.5"], "give --pairs, too"),
    ],
)
def test_what_the_command_refuses(project: Project, arguments: list[str], told: str) -> None:
    refused = RUN(app, ["judge", *arguments])
    assert refused.exit_code == 2, refused.output
    assert told in " ".join(refused.output.split())


def test_the_project_continues_after_a_used_up_budget_is_raised(project: Project, endpoint: JudgeServer) -> None:
    def asked_within(calls: int) -> RftConfig:
        args = {"model": endpoint.model, "criteria": {"quality": "length"}, "concurrency": 1}
        taskset = {"judge": "llm", "judge_args": {**args, "budget": {"project_calls": calls}}}
        settings = project.config.model_dump(mode="json", exclude_unset=True)
        settings["buffer"]["explorer_input"]["taskset"].update(taskset)
        return build_config(settings)

    write_text(project.home.config_file, dump_config(asked_within(3)))
    with pytest.raises(BudgetSpentError, match="project_calls allows 3; raise it"):
        judge(Project.open(project.home), 1)
    raised = asked_within(50)
    check_may_start(project.home, raised)
    write_config(project.home, raised)
    note = judge(Project.open(project.home), 1)
    assert note.sound
    found = (note.figures["judge_cached"], note.figures["judge_calls"], endpoint.calls)
    assert found == (3, note.rows - 3, note.rows)


def test_a_reward_replaced_by_the_judge_is_reported_once(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    for number in (3, 4):
        rows = [replace(row, run_reward=0.25) for row in rollouts(project, number)]
        project.store.write_rollouts(number, 0, rows)
        assert judge(project, number).own_rewards_replaced == 8
    said = [record.message for record in caplog.records if "from their workflow" in record.message]
    assert said == [
        "8 runs have a reward from their workflow, and the judge's reward replaces it; set judge: null "
        "to use the workflow's reward"
    ]
    assert judge(project, 1).own_rewards_replaced is None


@pytest.mark.parametrize(("explored", "trained"), [(1, 2), (4, 2)], ids=["later training", "earlier, dynamic style"])
def test_a_judgement_that_a_training_read_is_not_replaced_by_another(
    project: Project, tmp_path: Path, explored: int, trained: int
) -> None:
    factor = tmp_path / "factor.txt"
    factor.write_text("1")
    (tmp_path / "j.py").write_text(
        "from pathlib import Path\n"
        f"def scaled(task, response): return len(str(response)) * float(Path({str(factor)!r}).read_text())\n"
    )
    chosen, store = other_judge(f"{tmp_path / 'j.py'}:scaled", {}, []), project.store
    store.write_rollouts(explored, 0, rollouts(project, explored))
    version = judge(project, explored, chosen).judge_version
    factor.write_text("2")
    assert judge(project, explored, chosen).judge_version == version  # no training has read the earlier one
    before = store.digest(explored, judge_version=version)
    lineage = {"row_selection": {"digests": {str(explored): before}}}
    write(store, trained, Trained("there", 1, "w", 1, {}, {}, 0.0, lineage=lineage))
    assert judge(project, explored, chosen).sound  # the same rows
    factor.write_text("3")
    refusal = rf"training of r000{trained} read judgement {version} of r000{explored}.* 8 of 8 rows .*version"
    with pytest.raises(UserError, match=refusal):
        judge(project, explored, chosen)
    assert store.digest(explored, judge_version=version) == before
    assert judge(project, explored, other_judge("numeric", {}, [])).judge_version != version
    store.write_rollouts(explored, 0, [replace(row, run_reward=0.5) for row in rollouts(project, explored)])
    assert judge(project, explored, chosen).judge_version == version  # explored again: the training read other rows


def test_an_error_with_another_text_is_no_other_judgement(project: Project, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("after 600.01 s")
    (tmp_path / "j.py").write_text(
        "from pathlib import Path\n"
        "def failing(task, response):\n"
        "    if task['question'] == '1+2':\n"
        f"        raise TimeoutError(Path({str(text)!r}).read_text())\n"
        "    return 1.0\n"
    )
    chosen, store = other_judge(f"{tmp_path / 'j.py'}:failing", {}, []), project.store
    version = judge(project, 1, chosen).judge_version
    before = store.digest(1, judge_version=version)
    write(store, 2, Trained("there", 1, "w", 1, {}, {}, 0.0, lineage={"row_selection": {"digests": {"1": before}}}))
    text.write_text("after 600.02 s")
    assert judge(project, 1, chosen).judge_version == version
    assert store.digest(1, judge_version=version) == before
    assert any("600.01" in (row.judge_error or "") for row in store.judged_rows(1, version))


def test_a_judges_key_is_looked_for_before_anything_starts(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"base_url": "https://host/v1", "model": "grader", "api_key_env": "KEY_OF_THE_JUDGE"}
    arguments = {"model": model, "criteria": {"tone": "it is friendly"}}
    taskset = Taskset.model_validate({"path": "tasks.jsonl", "judge": "llm", "judge_args": arguments})
    with pytest.raises(UserError, match="KEY_OF_THE_JUDGE is not set"):
        check_judge(project, taskset)
    monkeypatch.setenv("KEY_OF_THE_JUDGE", "secret")
    check_judge(project, taskset)


def test_a_restored_judgement_has_the_same_report(project: Project) -> None:
    pipeline = {"experience_pipeline": {"operators": [{"name": "invalid_filter"}]}}
    processor = type(project.config.data_processor).model_validate(pipeline)
    filtered = Project(project.home, project.config.model_copy(update={"data_processor": processor}))
    made = judge(filtered, 1)
    assert made.operators_version is not None
    judge(project, 1, OtherJudge("numeric", {"tolerance": 0.5}))
    restored = restore(project, 1, made.judge_version)
    assert restored.operators_version == made.operators_version
    assert restored.judge_kinds == dict.fromkeys(restored.judge_names, "code")
    assert restored.figures == {name: made.figures[name] for name in restored.figures}
    assert restored.figures["judge_metrics"] == {"exact_match": 0.125}


@pytest.mark.parametrize(
    ("name", "args", "kind"),
    [
        *((name, {"model": "m", "criteria": {"good": "is good"}}, "model") for name in ("llm", "pairwise", "ranking")),
        ("vllm_format.py:vllm_format", {}, "code"),
        ("exact_match", {}, "code"),
    ],
)
def test_a_judge_that_asks_a_model_is_recorded_as_one(
    project: Project, tmp_path: Path, name: str, args: dict[str, Any], kind: str
) -> None:
    (tmp_path / "vllm_format.py").write_text("def vllm_format(response, task):\n    return 1.0\n")
    assert _kind_of({"sums": TasksetJudge(build_judge(name, args))}) == kind


@pytest.mark.slow
def test_the_command_compares_with_the_earlier_judgement_and_restores_it(project: Project) -> None:
    before = project.store.judge_version(1)
    said = RUN(app, ["judge", "--rounds", "1-2", "--judge", "numeric", "--args", '{"tolerance": 0.5}'])
    assert said.exit_code == 0, said.output
    now = project.store.judge_version(1)
    lines = [line.split() for line in said.stdout.splitlines()]
    assert ["r0001", "before", "exact_match", before, "0.125", "12.5%", "8", "0", "0"] in lines
    assert ["r0001", "now", "numeric", now, "0.375", "37.5%", "8", "0", "0"] in lines
    back = f"rft judge --rounds 1 --restore {before}"
    assert f"r0001: judgement {now} is in force; to go back: {back}" in said.stdout
    assert "Traceback" not in said.output

    restored = RUN(app, back.split()[1:])
    assert restored.exit_code == 0, restored.output
    assert [project.store.judge_version(number) for number in (1, 2)] == [before, now]
    note = read(project.store, 1).judged
    assert note is not None
    assert note.judge_names == {before: "exact_match", now: "numeric"}
    assert note.judge_codes == {before: None, now: None}  # no user code
    assert (note.judge_version, note.mean_reward, note.rows, note.sound) == (before, 0.125, 8, True)
    assert note.judge_seconds.keys() == {before, now}
    for arguments, message in (
        (
            ["--restore", "feed"],
            f"--restore feed: r0001 has the judgements {', '.join(sorted([before or '', now or '']))}",
        ),
        (["--restore", str(before), "--judge", "numeric"], "give --restore or a judge, not both"),
    ):
        refused = RUN(app, ["judge", "--rounds", "1", *arguments])
        assert refused.exit_code == 2
        assert message in " ".join(refused.output.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "judge j.py:none returned None; expected a number or JudgeOutput"),
        ("text", "judge j.py:text returned 'good'; expected a number or JudgeOutput"),
        ("mapping", "judge j.py:mapping returned {'reward': 1.0}; expected a number or JudgeOutput"),
        ("metric", "judge j.py:metric returned metric 'steps': None; expected a number"),
        ("group", "judge j.py:group returned None; expected a list of 4 rewards"),
    ],
)
def test_a_judge_without_a_reward_is_named_in_one_line(
    project: Project, tmp_path: Path, name: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "j.py").write_text(
        "from rft_platform.judging.types import JudgeOutput\n"
        "def none(task, response): pass\n"
        "def text(task, response): return 'good'\n"
        "def mapping(task, response): return {'reward': 1.0}\n"
        "def metric(task, response): return JudgeOutput(1.0, {'steps': None})\n"
        "def group(task, responses): pass\n"
    )
    before = project.store.judge_version(1)
    failed = RUN(app, ["judge", "--rounds", "1", "--judge", f"{tmp_path / 'j.py'}:{name}"])
    captured = capfd.readouterr()
    assert failed.exit_code == 1
    assert message in " ".join(failed.output.split())
    assert "Traceback" not in failed.output + captured.out + captured.err
    assert len((failed.output + captured.out + captured.err).splitlines()) < 8
    assert project.store.judge_version(1) == before


@pytest.mark.slow
def test_a_judgement_that_fails_a_blocking_check_is_not_put_in_force(
    project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    project.store.write_rollouts(3, 0, rollouts(project, 3)[1:])  # a run is missing: the group is incomplete
    write(project.store, 3, Explored(rows=7))
    kept = judge(project, 3)
    assert not kept.sound and project.store.judge_version(3) is None
    for arguments, code, message in (
        (["--restore", kept.judge_version], 2, f"judgement {kept.judge_version} of r0003 would fail a blocking check"),
        (["--judge", "numeric"], 1, "groups_are_complete"),
    ):
        failed = RUN(app, ["judge", "--rounds", "3", *arguments])
        captured = capfd.readouterr()
        said = failed.output + captured.out + captured.err
        assert failed.exit_code == code, said
        assert message in " ".join(said.split()) and "Traceback" not in said
        assert project.store.judge_version(3) is None
