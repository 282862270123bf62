"""Snapshots of the user's code: which files belong to it, how they are stored, and how two are compared."""

import sys
from pathlib import Path

import pytest

from rft_platform.common import code_snapshot
from rft_platform.common.code_snapshot import (
    CodeSnapshot,
    SourceFile,
    difference,
    keep_snapshot,
    parse_with_retries,
    read_snapshot,
    references_in,
    take_snapshot,
)
from rft_platform.common.errors import DamagedError
from rft_platform.common.user_code import keep_alive


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a judge, its helpers and a package; the working folder."""
    files = {
        "judge.py": "import json\nimport numpy\nfrom scores import exact\nraise SystemExit('must not be executed')\n",
        "scores.py": "import tools.text as text\ndef exact(a, b): return text.clean(a) == b\n",
        "unused.py": "",
        "tools/__init__.py": "",
        "tools/text.py": "from . import words\nfrom .deep.more import *\ndef clean(a): return a\n",
        "tools/data/read.py": "",  # its folder has no __init__.py
        "tools/words.py": "def broken(:\n",
        "tools/deep/__init__.py": "from ..other import thing\nimport tools.data.read\n",
        "tools/deep/more.py": "from rft_platform import tune\n",
        "tools/other.py": "thing = 1\n",
        "tools/unused.py": "",
    }
    for name, text in files.items():
        file = tmp_path / "agent" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path / "agent")
    return tmp_path / "agent"


def test_a_snapshot_follows_imports_within_the_users_files(folder: Path) -> None:
    found = take_snapshot([f"{folder}/judge.py:reward"])
    assert set(found.files) == {
        "judge.py", "scores.py", "tools/__init__.py", "tools/text.py", "tools/words.py", "tools/deep/__init__.py",
        "tools/deep/more.py", "tools/other.py", "tools/data/read.py",
    }  # fmt: skip
    assert found.files["tools/other.py"].text == "thing = 1\n"
    assert found.not_found == ()
    assert "scores" not in sys.modules and "tools" not in sys.modules


def test_a_module_on_the_path_is_found_without_an_import(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert take_snapshot(["tools.text:clean"]).not_found == ("tools.text:clean",)
    monkeypatch.syspath_prepend(str(folder))
    assert set(take_snapshot(["tools.deep.more:x"]).files) == {
        "tools/__init__.py", "tools/deep/__init__.py", "tools/deep/more.py", "tools/other.py", "tools/data/read.py",
    }  # fmt: skip


def test_the_digest_depends_on_the_source_and_not_on_the_folder(folder: Path, tmp_path: Path) -> None:
    first = take_snapshot([f"{folder}/judge.py:reward"])
    moved = folder.rename(tmp_path / "elsewhere")
    assert take_snapshot([f"{moved}/judge.py:reward"]).digest == first.digest
    (moved / "unused.py").write_text("x = 1\n")
    assert take_snapshot([f"{moved}/judge.py:reward"]).digest == first.digest
    (moved / "tools" / "other.py").write_text("thing = 2\n")
    assert take_snapshot([f"{moved}/judge.py:reward"]).digest != first.digest


def test_secrets_in_the_source_are_masked_and_a_change_is_still_noticed(folder: Path) -> None:
    def snapshot(password: str) -> CodeSnapshot:
        call = f'ask("https://me:{password}@api.example/v1", "Bearer abcdef0123456789")'
        (folder / "scores.py").write_text(f"def exact(a, b): return {call}\n")
        return take_snapshot([f"{folder}/scores.py:exact"])

    old, new = snapshot("hunter22"), snapshot("hunter33")
    (source,) = old.files.values()
    assert "def exact" in source.text and "hunter" not in source.text and "abcdef0123456789" not in source.text
    assert list(difference(old, new, "1", "2")) == ["scores.py: changed only where secrets are masked"]


def test_a_missing_file_and_installed_packages_are_named_or_left_out(folder: Path) -> None:
    found = take_snapshot(["numpy:sum", "rft_platform.judging:x", "gone.py:f", "nowhere.at_all:f"])
    assert found == CodeSnapshot({}, ("gone.py:f", "nowhere.at_all:f"))


def test_a_function_of_this_process_alone_has_its_source() -> None:
    def reward(task: object) -> float:
        return 0.25

    found = take_snapshot([keep_alive(reward, "judge")])
    (source,) = found.files.values()
    assert "return 0.25" in source.text


def test_too_many_files_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_snapshot, "MAX_FILES", 3)
    found = take_snapshot([f"{folder}/judge.py:reward"])
    assert len(found.files) == 3 and found.not_found == ("files beyond the first 3",)


def test_references_are_found_anywhere_in_a_configuration() -> None:
    values = {
        "workflow": "agents/solve.py:Solve", "judges": [{"judge": "shop.judges:polite"}], "port": 80,
        "url": "http://localhost:8000/v1", "model": "models:/shop@champion", "name": "demo", "live": "live:judge/f",
        "path": "C:",
    }  # fmt: skip
    assert list(references_in(values)) == ["agents/solve.py:Solve", "shop.judges:polite", "live:judge/f"]


def test_a_parse_error_caused_by_another_thread_is_retried() -> None:
    outcomes = iter([SystemError("AST constructor recursion depth mismatch"), SystemError("again"), "parsed"])

    def parse() -> str:
        if isinstance(outcome := next(outcomes), SystemError):
            raise outcome
        return str(outcome)

    assert parse_with_retries(parse) == "parsed"
    with pytest.raises(SystemError):
        parse_with_retries(lambda: (_ for _ in ()).throw(SystemError("always")))


OLD = CodeSnapshot(
    {"judge.py": SourceFile.of("def reward(a):\n    return 1.0\n"), "gone.py": SourceFile.of("x = 1\n")},
    ("live:workflow/f",),
)
NEW = CodeSnapshot({"judge.py": SourceFile.of("def reward(a):\n    return 0.5\n")}, ("elsewhere:f",))


def test_a_snapshot_is_read_back(tmp_path: Path) -> None:
    digest = keep_snapshot(tmp_path, OLD)
    assert digest == OLD.digest == keep_snapshot(tmp_path, OLD)
    assert read_snapshot(tmp_path, OLD.digest) == OLD
    assert [file.name for file in (tmp_path / "code").iterdir()] == [f"{digest}.json"]


def test_nothing_is_stored_without_user_code(tmp_path: Path) -> None:
    assert keep_snapshot(tmp_path, CodeSnapshot({})) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["{}", "no JSON", '{"files": {"judge.py": "other"}, "not_found": []}'])
def test_a_changed_snapshot_is_damage(tmp_path: Path, change: str) -> None:
    digest = keep_snapshot(tmp_path, OLD)
    assert digest is not None
    (tmp_path / "code" / f"{digest}.json").write_text(change)
    with pytest.raises(DamagedError, match="restore it from a"):
        read_snapshot(tmp_path, digest)


def test_an_unknown_digest_is_none(tmp_path: Path) -> None:
    assert read_snapshot(tmp_path, "0" * 16) is None
    assert read_snapshot(tmp_path, "../../etc/passwd") is None


def test_a_difference_names_files_and_versions() -> None:
    lines = list(difference(OLD, NEW, "policy version 4", "policy version 8"))
    assert lines[:3] == ["--- gone.py (policy version 4)", "+++ gone.py (policy version 8)", "@@ -1 +0,0 @@"]
    assert "-    return 1.0" in lines and "+    return 0.5" in lines
    assert lines[-2:] == ["- live:workflow/f: no source found", "+ elsewhere:f: no source found"]
    assert list(difference(OLD, OLD, "a", "b")) == []
