"""User code that forks: the child never goes on as if it were the platform. A repeated step survives failures."""

import subprocess
import sys
import threading

import pytest

from rft_platform.common.threads import repeating

SCRIPT = """
import asyncio, os, sys
from rft_platform.common.threads import await_user_code
from rft_platform.common.threads import call_in_thread

def fork(raises):
    if os.fork() == 0 and raises:
        raise LookupError("in the child")
    return "returned"

async def fork_on_the_loop(raises):
    return fork(raises)

async def main(where, raises):
    if where == "thread":
        returned = await call_in_thread(fork, {"raises": raises})
    else:
        returned = await await_user_code(fork_on_the_loop(raises), "workflow")
    print(returned, flush=True)
    _, status = os.wait()
    print("child ended with", os.waitstatus_to_exitcode(status))

asyncio.run(main(sys.argv[1], sys.argv[2] == "raises"))
"""


@pytest.mark.parametrize("where", ["thread", "loop"])
@pytest.mark.parametrize(("what", "code"), [("returns", 0), ("raises", 1)])
def test_a_forked_child_ends_where_the_user_code_ends(where: str, what: str, code: int) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, where, what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["returned", f"child ended with {code}"]
    assert ("LookupError: in the child" in done.stderr) == (what == "raises")


def test_a_repeated_step_is_tried_again_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    attempts, succeeded = [], threading.Event()

    def step() -> None:
        attempts.append(threading.current_thread().name)
        if len(attempts) == 1:
            raise OSError("no network")
        succeeded.set()

    with repeating(step, 0.01, "step", "the step failed"):
        assert succeeded.wait(20)
    assert attempts[0] == "step" and "the step failed and will be retried: no network" in caplog.text
    assert "step" not in {thread.name for thread in threading.enumerate()}
