"""The judge ``code``: runs the response's Python code against the task's tests, in sandboxed processes."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rft_platform.judging.judge_context import JudgeContext
from rft_platform.judging.judged_run import response_text
from rft_platform.judging.sandbox.run_program import Limits, Outcome, run_program, run_tested
from rft_platform.judging.types import JudgeOutput
from rft_platform.tasks.enclosed_text import enclosed

_OPENING = re.compile(r"^[ \t]*+```[ \t]*+([\w+.-]*+)[^\n`]*+\n", re.MULTILINE)
_CLOSING = re.compile(r"^[ \t]*+```", re.MULTILINE)
_PYTHON = ("python", "python3", "py")


async def code(
    task: dict[str, Any],
    response: Any,
    context: JudgeContext,
    *,
    tests_key: str = "tests",
    partial: bool = False,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    file_mb: int = 16,
    output_kb: int = 1024,
) -> JudgeOutput:
    """1.0 when the program passes every test, else 0.0; with ``partial`` the share of tests that pass.

    The program is the response's last fenced block marked as Python, else the last one without a language, else the
    whole text. The column ``tests_key`` holds

    - a list (or its JSON text) of ``{input, output}``: the program reads ``input`` and must print ``output``; white
      space at the ends of lines and of the text is ignored; or
    - Python code, or a list of such texts, that fails with an exception (``assert ...``). The test code can use the
      program's names, but runs in another process than the program: see ``sandbox.program_rpc``.

    Each test has its own process, limited to ``timeout_s`` (of wall time and of processor time), ``memory_mb`` of
    address space, files of ``file_mb`` and ``output_kb`` of output. Testing stops at the first test that fails; if
    ``partial`` is set, at the first test that times out. The metrics ``passed`` and ``timed_out`` are shares of all
    tests; tests that were not run count as not passed. Raises TimeoutError if all tests of a run together take longer
    than ``judge_timeout_s``.
    """
    tests, source = _tests(task, tests_key), extract_code(response_text(response))
    limits = Limits(
        wall_s=timeout_s,
        cpu_s=max(1, int(timeout_s + 0.999)),
        memory_mb=memory_mb,
        file_mb=file_mb,
        output_bytes=output_kb * 1024,
    )
    passed, late, spent_s = 0, 0, 0.0
    for test in tests:
        async with context.limit("sandbox", os.cpu_count() or 1):
            started = time.monotonic()
            good, outcome = await _try(source, test, limits)
            spent_s += time.monotonic() - started
        passed += good
        late += outcome.timed_out
        if outcome.timed_out or not (good or partial):
            break
        if context.timeout_s is not None and spent_s > context.timeout_s:
            raise TimeoutError(f"the tests took longer than {context.timeout_s:g} s (judge_timeout_s)")
    share = passed / len(tests)
    return JudgeOutput(
        share if partial else float(passed == len(tests)), {"passed": share, "timed_out": late / len(tests)}
    )


def extract_code(text: str) -> str:
    """The last fenced block marked as Python, else the last one without a language, else the whole text."""
    blocks = list(enclosed(text, _OPENING, _CLOSING))
    marked = [block for fence, block in blocks if fence[1].lower() in _PYTHON]
    unmarked = [block for fence, block in blocks if not fence[1]]
    return (marked or unmarked or [text])[-1]


async def _try(source: str, test: Any, limits: Limits) -> tuple[bool, Outcome]:
    if isinstance(test, Mapping):
        outcome = await run_program(source, str(test.get("input", "")), limits)
        return outcome.ok and _lines(outcome.stdout) == _lines(str(test["output"])), outcome
    outcome = await run_tested(source, test, limits)
    return outcome.ok, outcome


def _tests(task: Mapping[str, Any], key: str) -> Sequence[Any]:
    if key not in task:
        raise KeyError(f"the task has no column {key!r} with tests; its columns are {', '.join(task)}")
    value = task[key]
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        value = parsed if isinstance(parsed, list | dict) else value
    tests = value if isinstance(value, list) else [value]
    wrong = [test for test in tests if not (isinstance(test, str) or (isinstance(test, Mapping) and "output" in test))]
    if wrong or not tests:
        raise ValueError(
            f"column {key!r}: expected test code, or a list of it or of {{'input', 'output'}}, got "
            f"{str(wrong or tests)[:200]}"
        )
    return tests


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
