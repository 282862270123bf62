"""What ``python -m chaos`` refuses before it starts anything."""

from typer.testing import CliRunner

from chaos.__main__ import app
from chaos.scratch import MARKER, make_scratch
from rft_platform.config.resolve import resolve


def run(*arguments: object):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_a_folder_of_other_things_is_refused_and_left_as_it_was(tmp_path):
    """A project's home, say."""
    (tmp_path / "rft.yaml").write_text("project: mine\n")
    refused = run("--work", tmp_path)
    assert refused.exit_code == 2
    assert "no scratch folder" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rft.yaml"]


def test_an_existing_scratch_folder_is_replaced(tmp_path):
    (tmp_path / MARKER).write_text("")
    (tmp_path / "driver-1").mkdir()
    scratch = make_scratch(tmp_path)
    assert not (tmp_path / "driver-1").exists()
    length = resolve(scratch.load(rounds=5)).length(16)
    assert length is not None and length.rounds == 5


def test_an_unknown_target_is_refused(tmp_path):
    refused = run("--targets", "engine,kernel", "--work", tmp_path / "w")
    assert refused.exit_code == 2
    assert "kernel" in refused.stderr
    assert not (tmp_path / "w").exists()


def test_a_result_that_could_not_be_written_is_refused(tmp_path):
    refused = run("--json", tmp_path / "no" / "such.json", "--work", tmp_path / "w")
    assert refused.exit_code == 2
    assert not (tmp_path / "w").exists()
