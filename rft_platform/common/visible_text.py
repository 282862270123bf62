"""Make control characters of foreign text visible before a terminal or a log shows it.

Texts of exceptions and of models may contain escape sequences that change a terminal's title or colours, hide text, or
reverse its direction.
"""

import re

# All control characters except tab and line feed, the line separators of Unicode, and the marks for text direction.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""``text`` with each control character as ``\x1b`` or ``\u202e``; tabs and line feeds are unchanged."""
    return _CONTROL.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
