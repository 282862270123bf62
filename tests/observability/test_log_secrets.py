"""Secrets do not reach a log: by their shape, by the variable they come from, or because they were named."""

import base64
import io
import subprocess
import sys
import time

import pytest

from rft_platform.common import redaction as secrets
from rft_platform.common.errors import UserCodeError
from rft_platform.common.fault_classification import as_fault, cause_line, described
from rft_platform.common.redaction import hide, redact
from rft_platform.observability.masked_output import masked


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("connecting to postgresql://rft:hunter2@db:5432/dagster", "hunter2"),
        ("GET https://user:pa55word@hub.example/model", "pa55word"),
        ("GET https://tok3nalone@hub.example/model", "tok3nalone"),
        ("Authorization: Bearer abcdef123456", "abcdef123456"),
        ("{'Authorization': 'Basic dXNlcjpwYXNz'}", "dXNlcjpwYXNz"),
        ("GET /data?token=s3cr3tvalue&page=2", "s3cr3tvalue"),
        ("OPENAI_API_KEY=abc123 was set", "abc123"),
        ('{"token": "zzz999", "port": 1}', "zzz999"),
        ("password='swordfish'", "swordfish"),
        ("using hf_AbCdEfGhIjKlMnOpQrSt", "AbCdEfGhIjKlMnOpQrSt"),
        ("key sk-proj-0123456789abcdef", "0123456789abcdef"),
        ("x-api-key: s3cr3tvalue", "s3cr3tvalue"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.c2lnbmF0dXJl sent", "c2lnbmF0dXJl"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\n-----END RSA PRIVATE KEY-----", "MIIEpAIBAAKCAQEA"),
        ("POST https://hooks.slack.com/services/T0/B0/xyz failed", "T0/B0/xyz"),
    ],
)
def test_what_looks_like_a_secret_is_masked(line: str, secret: str) -> None:
    said = redact(line, environment={})
    assert secret not in said
    assert secrets.MASK in said


@pytest.mark.parametrize(
    "line",
    [
        "r0003: 312/512 rows",
        "max_tokens=64 prompt_tokens: 1200",
        "no-token here, see http://127.0.0.1:3000/runs/1f2e3d4c",
        "expected postgresql+psycopg2://USER:PASSWORD@HOST:PORT/NAME",
        "wrong token: read it from the trainer's lease file",
        "models:/small-e2e@champion serves policy version 4, /data/global_step_4",
    ],
)
def test_ordinary_lines_stay_as_they_are(line: str) -> None:
    assert redact(line, environment={}) == line


@pytest.mark.parametrize("secret", ["hunter2", "s3cr3t~value?>", "Long-Value_of/40+characters=that is no word"])
def test_base64_and_capitals_of_a_secret_are_masked(secret: str) -> None:
    """Of base64 at most the characters at both ends are shown, which also depend on neighbouring text."""
    environment = {"TOPSECRET": secret}
    assert redact(f"got {secret.upper()}", environment) == f"got {secrets.MASK}"
    for user in ("", "a", "ab", "user", "longer user"):
        for end in ("", "\n", ":more"):
            for encode in (base64.b64encode, base64.urlsafe_b64encode):
                text = encode(f"{user}:{secret}{end}".encode()).decode()
                masked_text = redact(f"sent {text}", environment)
                assert secrets.MASK in masked_text and len(masked_text) < len(f"sent {text}")
                kept = masked_text.removeprefix("sent ").replace(secrets.MASK, "")
                shown = len(f"{user}:".encode()) * 8 // 6 + len(end) * 8 // 6
                assert len(kept) <= shown + 8, (text, masked_text)


def test_values_of_secret_variables_are_masked_wherever_they_occur() -> None:
    environment = {
        "HF_TOKEN": "plainlooking",
        "RFT_ALERT_URL": "https://alerts.example/in/42",
        "RFT_DAGSTER_POSTGRES_URL": "postgresql://rft:longsecret@db/dagster",
        "HOME": "/home/somebody",
        "MY_KEY": "ab",
    }
    said = redact(
        "plainlooking at https://alerts.example/in/42 for longsecret in /home/somebody by ab", environment=environment
    )
    assert said == "*** at *** for *** in /home/somebody by ab"


def test_a_named_secret_is_masked_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_registered", set())
    assert redact("lease 4f5e6d7c", environment={}) == "lease 4f5e6d7c"
    hide("4f5e6d7c")
    hide("ab")
    assert redact("lease 4f5e6d7c in a lab", environment={}) == "lease *** in a lab"


@pytest.mark.parametrize("written", ["p%40ss%2Fw%26rd", "p%40ss/w%26rd", "p@ss/w&rd"])
def test_a_secret_is_masked_as_part_of_a_url_too(written: str) -> None:
    assert redact(f"GET http://h/?q={written}", environment={"DB_PASSWORD": "p@ss/w&rd"}) == "GET http://h/?q=***"


@pytest.mark.slow
def test_masking_a_long_text_takes_time_in_proportion() -> None:
    started = time.process_time()
    redact("a-" * 100_000 + "key " + "://" * 50_000, environment={})
    assert time.process_time() - started < 5


def test_a_masked_stream_is_a_stream() -> None:
    plain = io.StringIO()
    stream = masked(plain)
    assert masked(stream) is stream
    assert stream.write("token=s3cr3tvalue\n") == len("token=s3cr3tvalue\n")
    stream.writelines(["a\n", "password='swordfish'\n"])
    print("sk-0123456789abcdef", file=stream, flush=True)
    assert plain.getvalue() == "token=***\na\npassword='***'\nsk-***\n"
    assert not stream.isatty()


def test_output_that_user_code_closes_is_still_written() -> None:
    plain = io.StringIO()
    stream = masked(plain)
    stream.close()
    stream.write("a result")
    assert plain.getvalue() == "a result"


def test_a_traceback_on_the_terminal_is_masked() -> None:
    code = (
        "from rft_platform.observability.masked_output import mask_output; mask_output()\n"
        "raise RuntimeError('GET /v1?api_key=s3cr3t' + 'value')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "api_key=***" in done.stderr
    assert "s3cr3tvalue" not in done.stderr


def test_errors_of_the_platform_and_descriptions_of_others_are_masked() -> None:
    foreign = RuntimeError("no access to http://u:pa55word@h")
    assert described(foreign) == "RuntimeError: no access to http://***@h"
    assert str(UserCodeError(f"judge failed: {foreign}")) == "judge failed: no access to http://***@h"
    assert "pa55word" not in cause_line(as_fault(foreign))
