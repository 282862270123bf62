"""The package has no code for earlier versions of itself: version 1 of the stored formats is the first."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "rft_platform"
_BEFORE = r"(?:earlier|older|former|previous|old|past)"
_THINGS = "version release name default location home store schema format manifest database digest"
_STORED = "|".join(f"{thing}s?" for thing in _THINGS.split())
MENTION = re.compile(
    rf"\b{_BEFORE}\s+(?:{_STORED})\b|\bform(?:er|erly)\b|\blegacy\b|\bdeprecated\b|\bbackwards?[- ]compat", re.I
)

#: Files that mention earlier versions of something else, and of what.
OTHERS = {
    "inference/pool/engine_pool.py": "of the weights",
    "inference/vllm_engine/versions.py": "of vLLM",
}


def mentions(text: str) -> list[str]:
    """The mentions of earlier versions in a text, which may be wrapped over lines of comments."""
    return MENTION.findall(re.sub(r"\n\s*#?:?\s*", " ", text))


def texts() -> dict[str, str]:
    """The files of the package by their path in it, without the libraries of the web pages."""
    kinds = {".py", ".yaml", ".html", ".mako"}
    files = (path for path in PACKAGE.rglob("*") if path.suffix in kinds and path.is_file())
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in files}


@pytest.mark.parametrize(
    "text",
    [
        "# Earlier versions wrote NaN.",
        "a note of an earlier release",
        '"""``rollout_logprobs`` under its former name."""',
        "the homes of older\n    # versions have none",
        "FORMER = formerly_known",
        "#: of the old\n#: default",
        "legacy layout",
        "kept for backward compatibility",
    ],
)
def test_a_mention_is_found(text: str) -> None:
    assert len(mentions(text)) == 1


@pytest.mark.parametrize("text", ["transformers", "an earlier call", "rows older than the limit", "performer"])
def test_other_uses_of_these_words_are_allowed(text: str) -> None:
    assert mentions(text) == []


def test_the_package_mentions_no_earlier_version_of_itself() -> None:
    found = {name: words for name, text in texts().items() if (words := mentions(text))}
    assert {name: words for name, words in found.items() if name not in OTHERS} == {}
    assert set(OTHERS) <= set(found), "an exception that no file needs"
