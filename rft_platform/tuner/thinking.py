"""Whether a model can think before it answers, as far as its tokenizer tells."""

from pathlib import Path

END_OF_THOUGHT = "</think>"


def knows_thinking(model_path: str) -> bool:
    """Whether the tokenizer of a model folder has a token for the end of a thought; True where it cannot be read here.

    An engine refuses a parser of thoughts for a model without such a token.
    """
    tokenizer = Path(model_path).expanduser() / "tokenizer.json"
    return END_OF_THOUGHT in tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else True
