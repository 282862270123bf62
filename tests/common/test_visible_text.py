"""Control characters of foreign text are visible wherever the platform prints or logs it."""

import json
import logging
import sys

import pytest
from rich.console import Console

from rft_platform.cli.exits import complain
from rft_platform.cli.views.transcript import _print_message
from rft_platform.common.errors import UserError
from rft_platform.common.fault_classification import described
from rft_platform.common.redaction import visible
from rft_platform.observability.logs import HumanFormatter, JsonFormatter

HOSTILE = "\x1b]0;pwn\x07\x1b[31m\x9b2J\u202egnp\u2066\r\x00\x7f"
SHOWN = r"\x1b]0;pwn\x07\x1b[31m\x9b2J\u202egnp\u2066\x0d\x00\x7f"


def test_control_characters_are_visible_and_text_is_unchanged() -> None:
    assert visible(HOSTILE) == SHOWN
    ordinary = "a\tb\nc ä 中 🙂 e\u0301 non\u00a0breaking"
    assert visible(ordinary) == ordinary


def test_texts_of_errors_are_visible(capsys: pytest.CaptureFixture[str]) -> None:
    assert str(UserError(HOSTILE)) == SHOWN
    assert described(ValueError(HOSTILE)) == f"ValueError: {SHOWN}"
    complain(f"first\n{HOSTILE[:-3]}")
    assert capsys.readouterr().err == f"error: first\nerror: {SHOWN[:-12]}\n"


def test_log_lines_are_visible() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord("n", logging.WARNING, "f", 1, "got %s", (HOSTILE,), sys.exc_info())
    text, line = HumanFormatter("driver").format(record), json.loads(JsonFormatter("driver").format(record))
    for shown in (text, line["message"], line["exception"]):
        assert SHOWN in shown and not set(shown) & set("\x1b\x07\x9b\u202e\u2066\r\x00\x7f")


def test_messages_of_a_model_are_visible(capsys: pytest.CaptureFixture[str]) -> None:
    call = {"function": {"name": HOSTILE, "arguments": HOSTILE}}
    _print_message({"role": "assistant", "content": HOSTILE, "tool_calls": [call]}, Console(width=300))
    assert capsys.readouterr().out.count(SHOWN) == 3
