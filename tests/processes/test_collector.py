"""The garbage collector at the start and the end of processes."""

import gc
import subprocess
import sys

import pytest

from rft_platform.processes.collector import importing

SCRIPT = """
import atexit, gc, sys
from rft_platform.processes.collector import end_quickly

class Noted:
    def __del__(self):
        print("collected")

atexit.register(lambda: print("atexit"))
noted = Noted()
noted.own = noted
del noted, Noted
if sys.argv[1] == "quickly":
    end_quickly()
print("main")
"""


def test_nothing_is_collected_while_importing() -> None:
    with importing():
        assert not gc.isenabled()
        with importing():
            pass
        assert not gc.isenabled(), "the outer block goes on"
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.parametrize(("how", "collected"), [("quickly", []), ("as ever", ["collected"])])
def test_a_quick_end_looks_for_no_garbage_and_keeps_what_atexit_promises(how: str, collected: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["main", "atexit", *collected] and done.stderr == ""
