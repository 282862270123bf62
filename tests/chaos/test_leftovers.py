"""What a killed writer leaves behind is removed by the next writer of the same target; a living writer's is not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rft_platform.common.files import atomic_path, is_temporary, temporary_path, write_text

DIES = """
import os, signal, sys
from pathlib import Path
from rft_platform.common.files import atomic_path
with atomic_path(Path(sys.argv[1])) as temp:
    temp.mkdir() if sys.argv[2] == "folder" else temp.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def temporaries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if is_temporary(path.name)]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path, kind):
    target = tmp_path / "note.json"
    killed = subprocess.run([sys.executable, "-c", DIES, str(target), kind], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(temporaries(tmp_path)) == 1
    write_text(tmp_path / "note.json.other", "another target leaves it alone")
    assert len(temporaries(tmp_path)) == 1
    write_text(target, "whole")
    assert target.read_text() == "whole"
    assert temporaries(tmp_path) == []


def test_a_zombie_child_counts_as_dead(tmp_path):
    target = tmp_path / "note.json"
    child = subprocess.Popen([sys.executable, "-c", DIES, str(target), "file"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    write_text(target, "whole")
    assert temporaries(tmp_path) == []
    child.wait()


def test_a_living_writer_is_not_disturbed(tmp_path):
    target = tmp_path / "note.json"
    with atomic_path(target) as slow:
        slow.write_text("slow")
        write_text(target, "fast")
        assert slow.exists()
    assert target.read_text() == "slow"


def test_temporary_names_are_recognised(tmp_path):
    assert is_temporary(temporary_path(tmp_path / "a.parquet").name)
    assert is_temporary(temporary_path(tmp_path / "global_step_3", "old").name)
    assert not is_temporary(".hidden.tmp")
    assert not is_temporary("a.parquet")
