"""User code that forks: the child never goes on as if it were the platform."""

import subprocess
import sys

import pytest

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
