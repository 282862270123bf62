"""Make graded text inert: break every tag of the prompt and every control token of a chat template in the text.

A tokenizer recognises control tokens anywhere in a prompt: an answer with ``<|im_end|>`` could end the prompt's message
and write the grader's reply itself. The first character of each match is replaced by an HTML reference
(``&lt;|im_end|>``), so a reader still sees what was written.
"""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

#: Control tokens of common chat templates that are not spelled ``<|...|>``.
_CONTROL_TAGS = (
    "s", "bos", "eos", "pad", "unk", "cls", "sep", "mask", "sys", "user", "assistant", "system", "im_start", "im_end",
    "start_of_turn", "end_of_turn", "start_of_image", "end_of_image", "tool_call", "tool_response", "begin_of_text",
)  # fmt: skip
_CONTROL_MARKS = (
    "INST", "SYSTEM_PROMPT", "AVAILABLE_TOOLS", "TOOL_CALLS", "TOOL_RESULTS", "TOOL_CONTENT", "THINK", "PREFIX",
    "SUFFIX", "MIDDLE", "IMG", "BOS", "EOS", "CLS", "SEP", "MASK", "PAD", "UNK",
)  # fmt: skip

_INVISIBLE = "\u200b"  # represents every zero-width character in a skeleton
_INVISIBLES = "\u00ad\u034f\u061c\u115f\u180e\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2062\u2063\u2064\ufe0f\ufeff"
_LOOK_ALIKES = (
    ("<", "﹤‹⟨〈《«≺˂ᐸ❮"), (">", "﹥›⟩〉》»≻˃ᐳ❯"), ("/", "⁄∕⧸╱"), ("|", "│∣❘ǀ"),
    ("a", "аɑα"), ("b", "Ьƅ"), ("c", "сϲ"), ("d", "ԁ"), ("e", "еєҽ"), ("g", "ɡ"), ("h", "һ"), ("i", "іıι"), ("j", "ј"),
    ("k", "кκ"), ("l", "ӏⅼ"), ("n", "ոп"), ("o", "оοօ"), ("p", "рρ"), ("q", "ԛ"), ("r", "г"), ("s", "ѕ"), ("t", "тτ"),
    ("u", "υս"), ("v", "ѵν"), ("w", "ѡԝ"), ("x", "хχ"), ("y", "уγ"), ("z", "ᴢ"),
)  # fmt: skip
_SKELETON = (
    {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
    | dict.fromkeys(map(ord, _INVISIBLES), _INVISIBLE)
    | {ord(other): plain for plain, others in _LOOK_ALIKES for other in (*others, *others.upper()) if len(other) == 1}
)
_CLOSED = re.compile(r"</([\w-]+)>")
_NOISE = r"[\W\d_]{0,12}?"


def closed_tags(template: str) -> frozenset[str]:
    """Names of the tags that a prompt template closes; the graded text is inside these tags."""
    return frozenset(_CLOSED.findall(template))


def make_inert(text: str, tags: Collection[str] = (), tokens: Sequence[str] = ()) -> str:
    """Return ``text`` with ``tags``, the control tokens of common chat templates, and ``tokens`` broken.

    Tags and control tokens are also found if they are unclosed, contain other spaces or invisible characters, or use
    brackets and letters that look similar. ``tokens`` are found only with their exact spelling.
    """
    skeleton = text if text.isascii() else text.translate(_SKELETON)
    starts = {match.start() for match in _pattern(frozenset(tags)).finditer(skeleton)}
    starts |= {match.start() for token in tokens for match in re.finditer(re.escape(token), text)}
    if not starts:
        return text
    parts, end = [], 0
    for start in sorted(starts):
        parts += [text[end:start], "&lt;" if text[start] == "<" else f"&#{ord(text[start])};"]
        end = start + 1
    return "".join([*parts, text[end:]])


@lru_cache(maxsize=64)
def control_tokens(model: str) -> tuple[str, ...]:
    """Control tokens from the tokenizer files of a model folder on this machine; none for any other model.

    These are its special tokens, and the added tokens that look like markup.
    """
    folder = Path(model)
    if not model or not folder.is_dir():
        return ()
    found = [token for name in ("tokenizer.json", "tokenizer_config.json") for token in _added(folder / name)]
    return tuple(sorted(set(found), key=lambda token: (-len(token), token)))


def _added(file: Path) -> Iterable[str]:
    try:
        settings = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return
    listed, by_id = settings.get("added_tokens") or [], settings.get("added_tokens_decoder") or {}
    for entry in (*listed, *by_id.values()):
        token = str(entry.get("content", ""))
        if token.strip() and (entry.get("special") or token.strip()[0] in "<["):
            yield token


@lru_cache(maxsize=64)
def _pattern(tags: frozenset[str]) -> re.Pattern[str]:
    """Pattern for the beginnings of all tags and control tokens in a skeleton."""
    names, control = _any_of(tags), _any_of(_CONTROL_TAGS)
    gap = rf"[\s{_INVISIBLE}]*+"
    forms = [
        rf"<(?=[\s/{_INVISIBLE}]{{0,8}}\|)",
        rf"<(?={gap}/?{gap}(?:{control}){gap}>)",
        rf"<(?=<{gap}/?{gap}SYS)",
        rf"\[(?={gap}/?{gap}(?:{_any_of(_CONTROL_MARKS)}){gap}\])",
    ]
    if tags:
        forms.append(rf"<(?={_NOISE}/{_NOISE}(?:{names})|{_NOISE}(?:{names}){_NOISE}>)")
    return re.compile("|".join(forms), re.IGNORECASE)


def _any_of(names: Iterable[str]) -> str:
    """A pattern that matches any of these names, with invisible characters anywhere in them."""
    return "|".join(f"{_INVISIBLE}*".join(map(re.escape, name)) for name in sorted(names))
