"""Token ids as pieces of text with a colour: by log-prob, by the advantage of their row, or by the loss mask."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Colour = Literal["logprob", "advantage", "mask"]
COLOURS: tuple[Colour, ...] = ("logprob", "advantage", "mask")
#: Least log-prob of each class, from likely to unlikely: probabilities of about 90, 50, 14 and 1.8 %.
_LIKELY = ((-0.105, "p0"), (-0.69, "p1"), (-2.0, "p2"), (-4.0, "p3"), (-math.inf, "p4"))


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token, its style class, and what is shown when the pointer is on it."""

    text: str
    style: str
    title: str


def pieces(row: Mapping[str, Any], tokenizer: "Tokenizer | None", colour: Colour) -> list[Piece]:
    """The tokens of a row's response. Without a tokenizer their text is the id."""
    advantage = row["advantage"]
    found = []
    for token, logprob, trained in zip(row["response_ids"], row["rollout_logprobs"], row["loss_mask"], strict=True):
        text = str(token) if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
        title = (
            f"token {token}, log-prob {logprob:.3f}, p {math.exp(logprob):.1%}, {'trained' if trained else 'masked'}"
        )
        found.append(Piece(text or "∅", _style(colour, logprob, advantage, trained), title))
    return found


def _style(colour: Colour, logprob: float, advantage: float | None, trained: bool) -> str:
    if colour == "mask":
        return "trained" if trained else "masked"
    if colour == "advantage":
        if not trained or not advantage:
            return "masked" if not trained else "zero"
        size = "2" if abs(advantage) > 1 else "1"
        return f"{'up' if advantage > 0 else 'down'}{size}"
    return next(style for least, style in _LIKELY if logprob >= least)


@lru_cache(maxsize=4)
def tokenizer_in(folder: Path) -> "Tokenizer | None":
    """The tokenizer of a model's folder; None if the folder has no ``tokenizer.json``."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def new_messages(
    earlier: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The messages after those that an earlier call already had; all if the agent changed its history."""
    known = len(earlier) if list(messages[: len(earlier)]) == list(earlier) else 0
    return list(messages[known:])
