"""Tasks of the package reasoning-gym: ``reasoning_gym:NAME?size=500&seed=0`` and options of the dataset.

A row names the dataset's arguments and the number of its entry, so the judge ``reasoning_gym`` makes the same entry
again to score an answer, in a process with the same seed of hashes. The digest of a question decides its split: 3 of 5
are in ``train``, 1 in ``validation``, 1 in ``test``. So splits never share a question, whatever their sizes, seeds and
options.
"""

import difflib
import json
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl

from rft_platform.cluster.child import Child, repeatable_environment
from rft_platform.common.errors import UserError
from rft_platform.config.schema.buffer import REASONING_GYM as PREFIX
from rft_platform.tasks.answer_forms import is_scorable
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
        source = {"dataset": self.dataset, "size": DRAWS * self.size, "seed": self.seed, "options": dict(self.options)}
        with Child(__name__, imports=("reasoning_gym",), env=repeatable_environment()) as child:
            yield from enumerate(child.ask("drawn_rows", source, SPLITS[side], self.size), start=1)


def drawn_rows(source: Mapping[str, Any], digests: Sequence[int], count: int) -> list[dict[str, Any]]:
    """Up to ``count`` rows with different questions, whose digests are among ``digests``.

    Some datasets take the order of a set: their entries are equal only in processes with equal seeds of hashes.
    """
    rows: dict[str, dict[str, Any]] = {}
    for index in range(source["size"]):
        entry = entry_of({**source, "index": index})[1]
        question = entry["question"]
        if zlib.crc32(question.encode()) % 5 in digests and question not in rows:
            rows[question] = {"question": question, "answer": entry["answer"], COLUMN: {**source, "index": index}}
        if len(rows) == count:
            break
    return list(rows.values())


def entry_of(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The dataset and the entry that the column ``reasoning_gym`` of a row names."""
    options = json.dumps(row["options"], sort_keys=True)
    dataset = _dataset(row["dataset"], row["size"], row["seed"], options)
    return dataset, _entry(row["dataset"], row["size"], row["seed"], options, row["index"])


def score(row: Mapping[str, Any], answer: str) -> float:
    """The dataset's own score of an answer, 0 to 1; an answer that its scorer cannot or may not read has 0.

    Call it by ``call_bounded``: the time of a scorer depends on the answer, some entries on the seed of hashes.
    """
    dataset, entry = entry_of(row)
    if answer != entry["answer"] and not is_scorable(row["dataset"], answer):
        return 0.0
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
