"""Programs of a model in their sandbox: what passes, what does not, and that nothing gets out or stays behind."""

import asyncio
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft_platform.common.errors import UserCodeError, UserError
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import judge_runs
from rft_platform.judging.sandbox import run_program as sandbox
from rft_platform.judging.sandbox.run_program import Limits, run_program, run_tested
from rft_platform.judging.types import RunJudgement
from rft_platform.tasks.task import Task

from .conftest import run_rows

SUMS = [{"input": "1 2\n", "output": "3"}, {"input": "2 2\n", "output": "4\n"}]
#: The command in docs/judges.md.
BWRAP = (
    "bwrap --ro-bind / / --dev /dev --proc /proc --tmpfs /tmp --tmpfs /path/to/home --bind {folder} {folder} "
    "--unshare-all --die-with-parent --"
)
ADD = "a, b = map(int, input().split())\nprint(a + b)"
ASSERTS = "assert add(1, 2) == 3\nassert add(2, 2) == 4"


def judged(programs: list[str], tests: Any, **args: Any) -> list[RunJudgement]:
    task = Task("t", "tasks", "?", "", {"question": "?", "tests": tests})
    return judge_runs(run_rows(programs), {"t": task}, build_judge("code", args))


def test_programs_that_read_and_print() -> None:
    right, fenced, wrong, broken = judged(
        [ADD, f"Here:\n```python\n{ADD}\n```\nDone.", ADD.replace("+", "*"), "print("], SUMS, partial=True
    )
    assert (right.reward, fenced.reward, wrong.reward, broken.reward) == (1.0, 1.0, 0.5, 0.0)
    assert wrong.parts == {"code": 0.5, "code/passed": 0.5, "code/timed_out": 0.0}


@pytest.mark.parametrize(
    "response",
    [
        f"```python\n{ADD}\n```\nIt prints:\n```\n3\n```",
        f"```py\n{ADD}\n```\nRun it:\n```bash\npython add.py\n```",
        f"```\nprint('a draft')\n```\n```\n{ADD}\n```\n```text\n3\n```",
        f"```Python title=add\n{ADD}\n```",
        f"First a mistake:\n```python\nprint(1)\n```\nBetter:\n```python3\n{ADD}\n```\n",
        f"1. So:\n   ```python\n{ADD}\n   ```",
    ],
)
def test_the_program_is_the_last_block_of_python(response: str) -> None:
    (run,) = judged([response], SUMS)
    assert run.reward == 1.0


@pytest.mark.slow
def test_tests_stop_at_the_first_failure_or_time_out() -> None:
    started = time.monotonic()
    wrong, endless = judged(["print(0)", "while True:\n    pass"], SUMS * 20, timeout_s=1.0)
    assert (wrong.reward, endless.reward, endless.parts["code/timed_out"]) == (0.0, 0.0, 1 / 40)
    slow = "import time\na, b = map(int, input().split())\nif a == 2:\n    time.sleep(30)\nprint(a + b)"
    (part,) = judged([slow], [SUMS[0], SUMS[1], *SUMS * 20], partial=True, timeout_s=1.0)
    assert part.parts == {"code": 1 / 42, "code/passed": 1 / 42, "code/timed_out": 1 / 42}
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_the_tests_of_a_run_have_a_time_limit_in_all() -> None:
    tasks = {"t": Task("t", "tasks", "?", "", {"question": "?", "tests": [{"output": "1"}] * 50})}
    spec = replace(build_judge("code"), timeout_s=1.5)
    wrong, slow = judge_runs(run_rows(["print(2)", "import time\ntime.sleep(1)\nprint(1)"]), tasks, spec)
    assert wrong.reward == 0.0
    assert "TimeoutError: the tests took longer than 1.5 s (judge_timeout_s)" in str(slow.error)


def test_functions_under_test_and_programs_that_end_before_their_test() -> None:
    good = "def add(a, b):\n    return a + b"
    bad = "def add(a, b):\n    return a - b"
    leaves = "import sys\nsys.exit(0)"
    leaves_hard = "import os\nprint('ok', flush=True)\nos._exit(0)"
    runs = judged([good, bad, leaves, leaves_hard], ASSERTS)
    assert [run.reward for run in runs] == [1.0, 0.0, 0.0, 0.0]


CHEATS = {
    "reads what is run": "import os\nprint(open(__file__).read().rstrip().splitlines()[-1][7:-2], flush=True)\n"
    "os._exit(0)",
    "reads its input": "import os, sys\nprint(sys.stdin.readline(), flush=True)\nos._exit(0)",
    "ends early": "import sys\nsys.exit(0)",
    "ends when it is called": "import os\ndef add(a, b):\n    os._exit(0)",
    "leaves with success at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b):\n    return 0",
    "patches": "import builtins, math, sys\nbuiltins.abs = math.isclose = math.fabs = abs = lambda *a, **k: 0\n"
    "builtins.AssertionError = type('No', (), {})\nsys.excepthook = lambda *a: None\n__debug__ and None\n"
    "def add(a, b):\n    return 0",
    "brings its own modules": "class math:\n    isclose = lambda *a, **k: True\ndef add(a, b):\n    return 0",
    "is equal to anything": "class Any:\n    __eq__ = __le__ = __lt__ = __contains__ = lambda self, other: True\n"
    "    __sub__ = __rsub__ = __add__ = __radd__ = lambda self, other: 0\n    __hash__ = None\n"
    "def add(a, b):\n    return Any()",
    "is its own number": "class Any(int):\n    __eq__ = lambda self, other: True\ndef add(a, b):\n    return Any()",
    "looks up the stack": "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
    "        print({**frame.f_globals, **frame.f_locals}.get('word'), flush=True)\n        frame = frame.f_back\n"
    "    return 0",
}


CLOSE = "assert abs(add(1, 2) - 3) < 1e-6 and math.isclose(add(1, 2), 3)"


@pytest.mark.slow
@pytest.mark.parametrize("tests", [ASSERTS, CLOSE, "assert 3 in [add(1, 2)]"])
def test_no_cheating_program_passes(tests: str) -> None:
    runs = judged([*CHEATS.values(), "import math\ndef add(a, b):\n    return a + b"], tests)
    assert {how: run.reward for how, run in zip(CHEATS, runs, strict=False)} == dict.fromkeys(CHEATS, 0.0)
    assert runs[-1].reward == 1.0


async def test_tests_see_what_a_program_defines() -> None:
    source = """
import math
from collections import Counter, namedtuple
Point = namedtuple("Point", "x y")
class Empty(ValueError): ...
class Stack:
    size = 0
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise Empty("nothing there")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
def sort(values): values.sort(key=lambda v: -v)
def each(function, values): return [function(value) for value in values]
def numbers(n):
    for i in range(n): yield i
def fails(): return {}["key"]
"""
    tests = """
def check(candidate):
    values = [1, 3, 2]
    assert candidate(values) is None and values == [3, 2, 1]
check(sort)
assert each(lambda v: v * 2, (1, 2)) == [2, 4] and list(numbers(3)) == [0, 1, 2]
assert Counter("aab") == {"a": 2, "b": 1} and Point(1, 2) == (1, 2) and math.sqrt(4) == 2.0
stack = Stack().push(1).push({"a": (1, {2})})
assert len(stack) == 2 and isinstance(stack, Stack) and list(stack)[0] == 1 and 1 in stack
assert stack.pop() == {"a": (1, {2})} and stack.items == [1] and stack != 1
assert stack == Stack().push(1) and stack != Stack()
stack.size = 4
assert stack.size == 4
for kind, act in ((KeyError, fails), (Empty, Stack().pop), (TypeError, lambda: sort(1, 2, 3))):
    try:
        act()
    except kind:
        continue
    assert False, kind
"""
    found = await run_tested(source, tests)
    assert found.ok, found.stderr
    assert not (await run_tested(source, tests + "assert stack.size == 5")).ok


async def outcome(source: str, stdin: str = "", **limits: Any) -> Any:
    return await run_program(source, stdin, Limits(**limits))


async def test_the_kernel_enforces_the_limits_of_a_program() -> None:
    limits = Limits(cpu_s=7, memory_mb=300, file_mb=3, processes=2, open_files=50)
    names = sorted(limits.as_resource_limits())
    seen = await run_program(
        f"import resource\nfor name in {names}: print(name, *resource.getrlimit(getattr(resource, 'RLIMIT_' + name)))",
        limits=limits,
    )
    assert seen.stdout.splitlines() == [
        f"{name} {limit} {limit}" for name, limit in sorted(limits.as_resource_limits().items())
    ]


async def test_a_program_and_its_tests_end_at_their_wall_time() -> None:
    began = time.monotonic()
    program, tested = await asyncio.gather(
        run_program("import time; time.sleep(60)", limits=Limits(wall_s=0.3)),
        run_tested("import time; time.sleep(60)", "pass", Limits(wall_s=0.3)),
    )
    assert program.timed_out and tested.timed_out and not (program.ok or tested.ok)
    assert time.monotonic() - began < 30


@pytest.mark.slow
async def test_time_memory_files_output_and_processes_are_limited(tmp_path: Path) -> None:
    slow, busy, big, disk, loud, children = await asyncio.gather(
        outcome("import time; time.sleep(60)", wall_s=1.0),
        outcome("while True: pass", wall_s=30.0, cpu_s=1),
        outcome("x = 'x' * (1 << 30)", memory_mb=256),
        outcome("open('f', 'wb').write(b'x' * (4 << 20))", file_mb=1),
        outcome("while True: print('x' * 1000)", output_bytes=10_000),
        outcome("import os; os.fork()"),
    )
    assert slow.timed_out and not slow.ok
    assert not busy.timed_out and busy.returncode != 0
    assert "MemoryError" in big.stderr
    assert not disk.ok
    assert loud.output_exceeded and len(loud.stdout) == 10_000
    if os.geteuid() != 0:  # the kernel does not count the processes of root
        assert not children.ok and "BlockingIOError" in children.stderr


def test_a_program_gets_no_environment_and_leaves_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    seen = asyncio.run(
        outcome("import os; print(sorted(os.environ)); print(os.getcwd()); open('left', 'w').write('x')")
    )
    assert seen.ok and "SECRET" not in seen.stdout
    assert seen.stdout.splitlines()[1] not in map(str, Path(tempfile.gettempdir()).iterdir())


def namespaces() -> bool:
    """Whether this machine lets a process have its own."""
    return subprocess.run(["unshare", "--user", "--net", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not namespaces(), reason="this machine gives no user namespaces")
async def test_there_is_no_network() -> None:
    source = "import socket\ns = socket.socket()\ns.settimeout(2)\ns.connect(('127.0.0.1', PORT))"
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    tried = await outcome(source.replace("PORT", str(port)))
    server.close()
    await server.wait_closed()
    assert "Network is unreachable" in tried.stderr


@pytest.mark.slow
async def test_what_a_program_starts_ends_with_it() -> None:
    mark = f"sandbox-mark-{os.getpid()}"
    source = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)  # {mark}'])\n"
        "time.sleep(60)\n"
    )
    ended = await outcome(source, processes=64, wall_s=1.5)
    assert ended.timed_out
    for _ in range(100):
        if not marked(mark):
            break
        await asyncio.sleep(0.05)
    assert marked(mark) == []


PARENT = """
import asyncio
from rft_platform.judging.sandbox.run_program import Limits, run_program
asyncio.run(run_program("import time; print(1, flush=True); time.sleep(600)", limits=Limits(wall_s=600.0)))
"""


@pytest.mark.slow
def test_a_program_ends_when_the_process_that_judges_it_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # nobody removes the program's folder
    with subprocess.Popen([sys.executable, "-c", PARENT], env=environment) as parent:
        family: list[psutil.Process] = []
        while len(family) < 2 or "program.py" not in family[-1].cmdline()[-1] or "-S" in family[-1].cmdline():
            assert parent.poll() is None
            time.sleep(0.05)
            family = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    _, left = psutil.wait_procs(family, timeout=20)
    assert left == []


@pytest.fixture
def no_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The entry as it is on a machine that gives none."""
    entry = tmp_path / "entry.py"
    source = sandbox._ENTRY.read_text(encoding="utf-8")
    entry.write_text(source.replace(".unshare(", ".unshare(1 | ", 1), encoding="utf-8")  # a flag that is invalid
    assert entry.read_text(encoding="utf-8") != source
    monkeypatch.setattr(sandbox, "_ENTRY", entry)


ESCAPES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)  # MARK"])
    time.sleep(60)
time.sleep(0.3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("then", ["", "os._exit(3)", "os.kill(os.getpid(), 9)", "time.sleep(60)"])
async def test_what_leaves_its_session_ends_too_without_namespaces(no_namespaces: None, then: str) -> None:
    mark = f"sandbox-escape-{os.getpid()}-{len(then)}"
    began = time.monotonic()
    ended = await outcome(ESCAPES.replace("MARK", mark) + then, processes=64, wall_s=2.0)
    assert time.monotonic() - began < 20.0  # one that holds our pipes may not hold us
    assert ended.timed_out == ("sleep" in then), ended
    assert ended.ok == (then == "")
    if ended.timed_out:
        await asyncio.sleep(0.2)  # nobody of ours waits for the end of those that were killed
    assert marked(mark) == []


def marked(mark: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if any(mark in a for a in p.info["cmdline"] or ())]


PRINTS = [{"output": "1"}]
SOLVES = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize("tests", [PRINTS, ASSERTS])
def test_a_command_before_each_program_is_an_outer_sandbox(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tests: Any
) -> None:
    log = tmp_path / "log"
    script = tmp_path / "outer sandbox"
    script.write_text(f'#!/bin/sh\necho "$1" >> {log}\nshift\nexec "$@"\n')
    script.chmod(0o700)
    monkeypatch.setenv("RFT_SANDBOX", f"'{script}' {{folder}}")
    right, wrong = judged([f"{SOLVES}\nprint(1)", "print(2)"], tests)
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    folders = log.read_text().splitlines()
    assert len(set(folders)) == len(folders) >= 4 and all("rft-sandbox-" in folder for folder in folders)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("no-such-command --option", "No such file"),
        ("false", "exit code 1"),
        ("sh -c 'echo no namespaces >&2; exit 3'", "no namespaces"),
        ("true", "did not start"),
        ("env 'unclosed", "No closing quotation"),
    ],
)
def test_a_command_behind_which_no_program_runs_is_refused(
    monkeypatch: pytest.MonkeyPatch, command: str, reason: str
) -> None:
    monkeypatch.setenv("RFT_SANDBOX", command)
    with pytest.raises(UserError, match=f"RFT_SANDBOX={re.escape(command.strip())}.*{reason}"):
        judged([SOLVES], ASSERTS)


@pytest.mark.parametrize("tests", [PRINTS, ASSERTS])
def test_an_outer_sandbox_that_fails_later_gives_no_reward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tests: Any
) -> None:
    script = tmp_path / "outer"
    script.write_text(f'#!/bin/sh\ntest -e {tmp_path}/full && echo "no namespace is free" >&2 && exit 1\nexec "$@"\n')
    script.chmod(0o700)
    monkeypatch.setenv("RFT_SANDBOX", str(script))
    program = f"{SOLVES}\nprint(1)"
    assert judged([program], tests)[0].reward == 1.0
    (tmp_path / "full").touch()
    with pytest.raises(OSError, match="the sandbox of a program did not start: no namespace is free"):
        judged([program], tests)


def test_the_documentation_shows_the_command_that_is_tested() -> None:
    text = (Path(__file__).parents[2] / "docs" / "judges.md").read_text("utf-8")
    assert BWRAP in text.replace("\\\n  ", "")


def has_bubblewrap() -> bool:
    command = BWRAP.replace("{folder}", "/var").replace("/path/to/home", "/mnt").split()
    return bool(shutil.which("bwrap")) and subprocess.run([*command, "true"], check=False).returncode == 0


@pytest.mark.skipif(not has_bubblewrap(), reason="bubblewrap is not installed or gets no namespaces")
def test_bubblewrap_hides_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "tasks.jsonl").write_text("answer")
    monkeypatch.setenv("RFT_SANDBOX", BWRAP.replace("/path/to/home", str(hidden)))
    program = f"import os\nprint(os.listdir({str(hidden)!r}))\nopen('own', 'w').write('x')\n{SOLVES}"
    listed, tested = judged([program], [{"output": "[]"}])[0], judged([program], ASSERTS)[0]
    assert (listed.reward, tested.reward) == (1.0, 1.0)


def test_tests_that_are_none() -> None:
    for tests, told in (([], "expected test code"), ([{"input": "1"}], "expected test code")):
        with pytest.raises(UserCodeError, match=told):
            judged([ADD], tests)


def has_landlock() -> bool:
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 1


@pytest.mark.skipif(not has_landlock(), reason="this kernel has no Landlock")
def test_a_program_changes_files_in_its_own_folder_only(tmp_path: Path) -> None:
    kept, folder = tmp_path / "kept", tmp_path / "folder"
    kept.write_text("kept")
    folder.mkdir()
    program = f"""
import os, pathlib, tempfile
def refused(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return True
kept = pathlib.Path({str(kept)!r})
assert refused(kept.write_text, "changed") and refused(kept.unlink) and refused(os.truncate, kept, 0)
assert refused(os.rename, kept, "mine") and refused(os.rmdir, {str(folder)!r}) and refused(os.link, kept, "mine")
for place in ({str(tmp_path)!r}, "/tmp", "/dev/shm", "/var/tmp"):
    assert refused(pathlib.Path(place, "new").write_text, "x") and refused(os.mkdir, place + "/new"), place
assert kept.read_text() == "kept"
own = pathlib.Path("own")
own.mkdir()
(own / "file").write_text("x")
(own / "file").rename("other")
assert tempfile.NamedTemporaryFile().write(b"x") and pathlib.Path("other").read_text() == "x"
open(os.devnull, "w").write("x")
print("done")
"""
    outcome = asyncio.run(run_program(program))
    assert (outcome.stdout, outcome.stderr) == ("done\n", "")
    assert kept.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "kept"]
