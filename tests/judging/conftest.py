"""A model that judges, served over HTTP as real ones are, which counts what it is asked."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rft_platform.experience.record import RolloutRow
from rft_platform.judging.judge_context import JudgeState
from rft_platform.tasks.task import Task
from tests.experience.samples import step_row

Say = Callable[[str], str]


class JudgeServer(ThreadingHTTPServer):
    """An OpenAI endpoint that says what ``say`` makes of the prompt's last message."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, say: Say) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.say = say
        self.delay_s = 0.0
        self.failures: list[int] = []  # statuses of the next answers
        self.retry_after = ""  # what failures say
        self.requests: list[dict[str, Any]] = []
        self.running = self.most = 0
        self.lock = threading.Lock()

    @property
    def calls(self) -> int:
        return len(self.requests)

    @property
    def model(self) -> dict[str, str]:
        """The endpoint as a judge's argument."""
        return {"base_url": f"http://127.0.0.1:{self.server_address[1]}/v1", "model": "grader"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: JudgeServer

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        with server.lock:
            server.requests.append(asked)
            server.running += 1
            server.most = max(server.most, server.running)
            status = server.failures.pop(0) if server.failures else 200
        time.sleep(server.delay_s)
        if status == 200:
            text = server.say(asked["messages"][-1]["content"])
            message = {"role": "assistant", "content": text}
            body: dict[str, Any] = {
                "id": "1", "object": "chat.completion", "created": 0, "model": asked["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100},
            }  # fmt: skip
        else:
            body = {"error": {"message": f"status {status}"}}
        data = json.dumps(body).encode()
        with server.lock:
            server.running -= 1
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if status != 200 and self.server.retry_after:
            self.send_header("retry-after", self.server.retry_after)
        with suppress(BrokenPipeError, ConnectionResetError):  # a judge whose time was up has gone
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def graded(prompt: str) -> str:
    """Scores that follow from the answer: ``quality`` is its length up to 5, ``tone`` is always 3."""
    answer = re.findall(r"<answer>\n(.*?)\n</answer>", prompt, re.DOTALL)[0]
    scores = {"quality": min(5, max(1, len(answer))), "tone": 3}
    named = [name for name in scores if f"- {name}:" in prompt]
    return "I think so.\n" + json.dumps({"reasons": "because", "scores": {name: scores[name] for name in named}})


@pytest.fixture
def endpoint() -> Iterator[JudgeServer]:
    """A judge's model; it grades as ``graded`` does until it is told otherwise."""
    server = JudgeServer(graded)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def state(tmp_path: Path) -> JudgeState:
    """Where answers are kept."""
    return JudgeState(tmp_path / "judging", "proj")


TASKS = {"t": Task("t", "tasks", "Say a.", "a", {"question": "Say a.", "answer": "a"})}


def run_rows(answers: list[str], group: str = "g", task: str = "t", **more: Any) -> list[RolloutRow]:
    """One run of one call for each answer, all of one task."""
    return [
        a_row(f"{group}-{number}", 0, answer, group=group, task=task, **more) for number, answer in enumerate(answers)
    ]


def a_row(
    run: str,
    step: int,
    text: str | None,
    *,
    group: str = "g",
    task: str = "t",
    messages: list[dict[str, Any]] | None = None,
    tools: list[dict[str, Any]] | None = None,
    tokens: int = 1,
    **message: Any,
) -> RolloutRow:
    """A model call that answered ``text``."""
    return step_row(
        run, step, response_ids=[2] * tokens, task_id=task, taskset="tasks", group_id=group,
        messages=messages or [{"role": "user", "content": "Say a."}], tools=tools or [],
        response={"role": "assistant", "content": text, **message},
    )  # fmt: skip
