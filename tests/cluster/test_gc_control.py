"""The garbage collector at the start and the end of processes."""

import gc
import importlib.util
import subprocess
import sys

import pytest

from rft_platform.cluster.this_process import importing

SCRIPT = """
from rft_platform.cluster.this_process import keep_imports

class Noted:
    def __init__(self, name):
        self.name, self.me = name, self

    def __del__(self):
        print("collected", self.name)

def leave(name):
    Noted(name)

leave("a user's, before")
import gc; gc.collect()
module = Noted("a module")
keep_imports()
del module
leave("a user's, after")
print("end of main")
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


def test_packages_may_count_as_not_installed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with importing(without=("colorsys", "json")):
        assert importlib.util.find_spec("colorsys") is None and importlib.util.find_spec("json") is not None
        with pytest.raises(ImportError):
            importlib.import_module("colorsys")
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)


def test_objects_of_imports_are_frozen_and_later_ones_are_collected() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["collected a user's, before", "end of main", "collected a user's, after"]
    assert done.stderr == ""
