"""Whether a model can write reasoning before its answer, according to its tokenizer."""

from pathlib import Path

END_OF_THOUGHT = "</think>"


def knows_thinking(model_path: str) -> bool:
    """Whether the tokenizer of a model folder has an end-of-reasoning token; True if it cannot be read here.

    An engine refuses a reasoning parser for a model without such a token.
    """
    tokenizer = Path(model_path).expanduser() / "tokenizer.json"
    return END_OF_THOUGHT in tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else True
