"""Tasks of the package reasoning-gym: ``reasoning_gym:NAME?size=500&seed=0`` and options of the dataset.

A row names the dataset's arguments and the number of its entry, so the judge ``reasoning_gym`` makes the same entry
again to score an answer. The digest of a question decides its split: 3 of 5 are in ``train``, 1 in ``validation``, 1 in
``test``. So splits never share a question, whatever their sizes, seeds and options.
"""

import difflib
import json
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl

from rft_platform.common.errors import UserError
from rft_platform.config.schema.buffer import REASONING_GYM as PREFIX
from rft_platform.tasks.readers import ALIASES, NumberedRow

COLUMN = "reasoning_gym"  # of a row: dataset, options, index
SIZE = 500
SPLITS: Mapping[str, tuple[int, ...]] = MappingProxyType({"train": (2, 3, 4), "validation": (1,), "test": (0,)})
DRAWS = 20  # entries drawn per row of the split; a dataset with few different questions gives fewer rows

_MANY = "it accepts many answers and states none"
#: Datasets that are refused, with the reason.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"), _MANY),
        "composite": "it is a mixture: give its datasets as tasksets with weights",
    }
)


@dataclass(frozen=True, slots=True)
class GymSource:
    """A dataset of reasoning-gym with its options."""

    dataset: str
    size: int
    seed: int
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, path: str) -> "GymSource":
        """The source that ``reasoning_gym:NAME?option=value`` names. Raises UserError for an unknown name or option."""
        name, _, query = path.removeprefix(PREFIX).partition("?")
        _check_name(name)
        options = {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
        source = cls(name, options.pop("size", SIZE), options.pop("seed", 0), options)
        if not isinstance(source.size, int) or source.size < 1 or not isinstance(source.seed, int):
            raise UserError(f"{path}: size and seed are whole numbers, size at least 1")
        try:
            _dataset(name, 1, source.seed, json.dumps(options, sort_keys=True))
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"{path}: the dataset {name} does not take these options: {error}") from None
        return source

    def rows(self, split: str) -> Iterator[NumberedRow]:
        """Up to ``size`` rows of a split, numbered from 1, with columns question, answer and ``reasoning_gym``.

        No question occurs twice. Raises UserError for an unknown split.
        """
        side = next((name for name, words in ALIASES.items() if split in words), None)
        if side is None:
            raise UserError(f"{PREFIX}{self.dataset}: split {split!r} given, expected one of {', '.join(SPLITS)}")
        draws = DRAWS * self.size
        arguments = {"dataset": self.dataset, "size": draws, "seed": self.seed, "options": dict(self.options)}
        seen: set[str] = set()
        for index in range(draws):
            entry = entry_of({**arguments, "index": index})[1]
            question = entry["question"]
            if zlib.crc32(question.encode()) % 5 in SPLITS[side] and question not in seen:
                seen.add(question)
                row = {"question": question, "answer": entry["answer"], COLUMN: {**arguments, "index": index}}
                yield len(seen), row
            if len(seen) == self.size:
                return


def entry_of(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The dataset and the entry that the column ``reasoning_gym`` of a row names."""
    options = json.dumps(row["options"], sort_keys=True)
    dataset = _dataset(row["dataset"], row["size"], row["seed"], options)
    return dataset, _entry(row["dataset"], row["size"], row["seed"], options, row["index"])


def score(row: Mapping[str, Any], answer: str) -> float:
    """The dataset's own score of an answer, 0 to 1; an answer that its scorer cannot read has 0."""
    dataset, entry = entry_of(row)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(dataset.score_answer(answer, entry))
    except Exception:  # scorers parse the answer with int(), json, numpy, ... and raise whatever these raise
        return 0.0


@lru_cache(maxsize=64)
def _dataset(name: str, size: int, seed: int, options: str) -> Any:
    return _package().create_dataset(name, size=size, seed=seed, **json.loads(options))


@lru_cache(maxsize=4096)
def _entry(name: str, size: int, seed: int, options: str, index: int) -> dict[str, Any]:
    entry: dict[str, Any] = _dataset(name, size, seed, options)[index]
    return entry


def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise UserError(
            "tasks of reasoning_gym need the package reasoning-gym: pip install 'rft-platform[environments]' "
            "(one of its dependencies is compiled: a C compiler is needed)"
        ) from None
    return reasoning_gym


def _check_name(name: str) -> None:
    from importlib import import_module

    _package()
    known = set(import_module("reasoning_gym.factory").DATASETS) - set(REFUSED)
    if name in REFUSED:
        raise UserError(f"{PREFIX}{name} is not supported: {REFUSED[name]}")
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or sorted(known)
        raise UserError(f"{PREFIX}{name}: unknown dataset; expected for example {', '.join(near)}")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
