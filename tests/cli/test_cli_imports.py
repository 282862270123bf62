"""`rft import` and `rft forget` in a home without a project: what they print, and their exit codes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from rft_platform.config.home import Home

EXPORTS = Path(__file__).parents[1] / "traces" / "exports"
Rft = Callable[..., Result]


def test_the_report_of_an_import_names_datasets_and_skipped_traces(rft: Rft, home: Home, tmp_path: Path) -> None:
    export = tmp_path / "June 2026.jsonl"
    strange = json.dumps({"key": "k", "run_id": "\x1b]0;title\x07"})
    export.write_text((EXPORTS / "langsmith.jsonl").read_text() + '{"half": \n' + strange + "\n")
    said = rft("import", str(export), "--format", "langsmith")
    assert said.exit_code == 0, said.output
    lines = said.output.splitlines()
    assert lines[0] == "18 traces imported as 'june-2026': 12 tasks, 15 demonstrations, 6 preference pairs"
    assert lines[1] == "traces or records skipped: 2"
    assert lines[2].startswith("  June 2026.jsonl:52: Expecting value")
    assert lines[3] == "  \\x1b]0;title\\x07: has feedback, and no run"
    assert f"demonstrations: {home.imports / 'demonstrations'}" in lines
    again = rft("import", str(export), "--format", "langsmith", "--name", "again", "--json")
    assert json.loads(again.stdout)["known"] == {"june-2026": 18}
    one = tmp_path / "one.jsonl"
    one.write_text((EXPORTS / "langfuse-traces.jsonl").read_text().splitlines()[0])
    said = rft("import", str(one), "--format", "langfuse")
    assert said.output.startswith("1 trace imported as 'one': 1 task, 1 demonstration, 0 preference pairs\n")


def test_a_default_name_replaces_no_import_of_another_source(
    rft: Rft, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for month in ("june", "july"):
        (tmp_path / month).mkdir()
        (tmp_path / month / "traces.jsonl").write_bytes((EXPORTS / "langsmith.jsonl").read_bytes())
    arguments = ("import", "traces.jsonl", "--format", "langsmith")
    monkeypatch.chdir(tmp_path / "june")
    assert [rft(*arguments).exit_code for _ in range(2)] == [0, 0], "the same file again"
    refused = rft(*arguments, "--experiment", "other")
    assert refused.exit_code == 2
    monkeypatch.chdir(tmp_path / "july")
    refused = rft(*arguments)
    assert refused.exit_code == 2
    assert f"another source, {tmp_path / 'june' / 'traces.jsonl'}: give --name" in " ".join(refused.output.split())
    assert rft(*arguments, "--name", "traces").exit_code == 0, "replaced on request"


def test_wrong_requests_end_in_one_line(rft: Rft, home: Home) -> None:
    for arguments, message in (
        (["import", "absent.jsonl", "--format", "otel"], "absent.jsonl: no such file"),
        (["import", "absent.jsonl", "--format", "otel", "--redact", "absent:redact"], "absent"),
        (["forget"], "name a person by --subject, or imported traces by --trace"),
        (["forget", "--subject", "ann"], "no imported trace has the subject or the id 'ann'"),
    ):
        said = rft(*arguments)
        assert (said.exit_code, message in said.output) == (2, True), said.output
    assert not home.config_file.exists()


def test_forgotten_traces_leave_the_home(rft: Rft, home: Home) -> None:
    rft("import", str(EXPORTS / "langfuse.jsonl"), "--format", "langfuse")
    said = rft("forget", "--subject", "user-1", "--trace", f"{4:032x}")
    assert said.output.splitlines() == [
        "erased 11 rows, 0 round(s) held some of them",
        "no model version was trained on them",
    ]
    assert "user-1" not in "".join(file.read_text() for file in home.imports.rglob("*.jsonl"))
    assert rft("forget", "--subject", "user-1").output.startswith("erased 0 rows"), "it was forgotten before"
