"""JSON of model calls: which text holds a character that PostgreSQL does not store."""

import json

import pytest

from rft_platform.common import json_codec


@pytest.mark.parametrize(
    "text", ["\0", "a\\\0", "\\" * 3 + "\0", "\\u0000 \0", "\ud800\0", "u0000", "\\u0000", "\\\\u0000", ""]
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
def test_nul_is_found_in_every_form_that_the_parser_accepts(text: str, encoding: str) -> None:
    data = json.dumps({"a": [text]}).encode(encoding)
    assert json_codec.has_nul(data) == ("\0" in text or encoding != "utf-8")
    assert json_codec.has_nul(json.dumps({text: 1}).encode()) == ("\0" in text)
