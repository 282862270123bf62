"""The imports of a home: the datasets of each import, and what was imported.

``RFT_HOME/imports`` has a folder for each kind of row, which a configuration names as a dataset
(``path: .rft/imports/demonstrations``), with one file for each import, and one note for each import. An import with a
name that is known replaces the earlier one. A trace belongs to one import: later imports leave it out. Traces that
``rft forget`` erased are not imported again; only keyed digests of their ids and subjects are kept.
"""

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import compress, pairwise
from operator import not_
from pathlib import Path
from typing import Any

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import UserError
from rft_platform.common.files import atomic_path, digest_file, digest_json, read_sealed_json, write_sealed_json
from rft_platform.common.personal_data import Redaction
from rft_platform.common.user_code import load_object
from rft_platform.config.home import Home, private_files
from rft_platform.object_store.mirror import removing
from rft_platform.tasks.task import ORIGIN
from rft_platform.traces.datasets import KINDS, Row, ScoreRule, datasets_of
from rft_platform.traces.readers.base import read_traces
from rft_platform.traces.readers.formats import FORMATS
from rft_platform.traces.readers.trace import BadTrace, Trace

LISTED = 20  # skipped traces that a report names
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """What to import, and how."""

    name: str
    format: str
    source: str
    experiment: str | None = None  # of MLflow
    link: str | None = None  # page of a trace, with ``{id}`` in place of its id
    score_rule: ScoreRule = field(default_factory=ScoreRule)
    default_name: bool = False  # ``name`` is ``name_of(source)``: it replaces no import of another source

    @property
    def place(self) -> str:
        """The source, independent of the current folder."""
        return self.source if "://" in self.source else str(Path(self.source).expanduser().absolute())


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of an import."""

    name: str
    format: str
    source: str  # a file's or folder's absolute path, or a URI
    experiment: str | None
    imported: int  # traces
    known: dict[str, int]  # traces that earlier imports have, by import
    forgotten: int  # traces that `rft forget` has erased
    repeated: int  # records of traces whose id occurs again in the source
    redacted: int  # traces whose text the redaction changed
    bad: int  # traces that were skipped
    bad_traces: tuple[BadTrace, ...]  # the first of them
    rows: dict[str, int]  # by kind
    files: dict[str, str]  # SHA-256 of each kind's file
    score: str | None  # the score that compared answers
    scores: dict[str, int]  # how many traces have each score

    @property
    def digest(self) -> str:
        """Digest of the rows."""
        return digest_json(self.files)


class Imports:
    """The folder ``RFT_HOME/imports``."""

    def __init__(self, home: Home) -> None:
        """Nothing is created."""
        self.root = home.imports

    def names(self) -> list[str]:
        """The names of all imports."""
        return sorted(note.stem for note in self.root.glob("*.json"))

    def report(self, name: str) -> ImportReport:
        """The report of an import. Raises UserError if there is none of this name."""
        if name not in self.names():
            raise UserError(f"no import {name!r} in {self.root}; there are {', '.join(self.names()) or 'none'}")
        found = read_sealed_json(self._note(name))
        return ImportReport(**{**found, "bad_traces": tuple(BadTrace(**bad) for bad in found["bad_traces"])})

    def file(self, kind: str, name: str) -> Path:
        """The file with the rows of a kind of an import; it does not exist if there are none."""
        return self.root / kind / f"train-{name}.jsonl"

    def run(self, request: ImportRequest, redaction: Redaction) -> ImportReport:
        """Import the traces of a source. A repeated call gives the same files.

        Raises UserError for a source that is not there, an unknown format, a score that no trace has, or a default
        name that an import of another source has.
        """
        _check(request)
        with private_files():
            self.root.mkdir(parents=True, exist_ok=True)
            with locked(self.root / "lock"):
                return self._run(request, redaction)

    def _run(self, request: ImportRequest, redaction: Redaction) -> ImportReport:
        self._check_name(request)
        chosen = _Chosen(self._owners(request.name), self.forgotten())
        for found in read_traces(FORMATS[request.format](), request.source, request.experiment):
            chosen.add(found)
        chosen.check(request)
        before = redaction.calls
        traces = [_stored(trace, request, redaction) for trace in chosen.traces.values()]
        made = datasets_of(traces, {"format": request.format, "imported_as": request.name}, request.score_rule)
        for kind, rows in made.rows.items():
            write_rows(self.file(kind, request.name), rows)
        files = {kind: self.file(kind, request.name) for kind in made.rows}
        names = sorted({name for trace in traces for name in trace.scores})
        report = ImportReport(
            name=request.name, format=request.format, source=request.place, experiment=request.experiment,
            imported=len(traces), known=chosen.known,
            forgotten=chosen.forgotten, repeated=chosen.repeated, redacted=redaction.calls - before,
            bad=len(chosen.bad), bad_traces=tuple(chosen.bad[:LISTED]),
            rows={kind: len(rows) for kind, rows in made.rows.items()},
            files={kind: digest_file(file) for kind, file in files.items() if file.exists()}, score=made.score,
            scores={name: sum(name in trace.scores for trace in traces) for name in names},
        )  # fmt: skip
        write_sealed_json(self._note(request.name), asdict(report))
        return report

    def _check_name(self, request: ImportRequest) -> None:
        """Raise UserError if the default name is that of an import of another source, which it would replace."""
        if not request.default_name or request.name not in self.names():
            return
        known = self.report(request.name)
        if (known.source, known.experiment) != (request.place, request.experiment):
            where = known.source if known.experiment is None else f"{known.source}, experiment {known.experiment}"
            raise UserError(
                f"there is an import {request.name!r} of another source, {where}: give --name with another name, or "
                f"--name {request.name} to replace it"
            )

    def refuses(self, names: Iterable[str]) -> bool:
        """Whether some of the ids or subjects were erased before."""
        if not self.root.exists():
            return False
        refused = self.forgotten()
        return any(refused.digest(name) in refused.digests for name in names)

    def erase(self, is_erased: Callable[[dict[str, Any]], bool], names: Iterable[str]) -> list[Row]:
        """Erase the rows of some traces, and refuse them from now on; returns the rows.

        ``is_erased`` says so of an element of a row's ``imported_from``; ``names`` are ids or subjects to refuse.
        """
        erased: list[Row] = []
        self.root.mkdir(parents=True, exist_ok=True)
        with private_files(), locked(self.root / "lock"):
            self._refuse(names)
            for name in self.names():
                report, gone = self.report(name), 0
                for kind in KINDS:
                    rows = read_jsonl(self.file(kind, name))
                    erased_here = [any(map(is_erased, row[ORIGIN])) for row in rows]
                    if any(erased_here):
                        write_rows(self.file(kind, name), list(compress(rows, map(not_, erased_here))))
                    gone += sum(erased_here)
                    erased += compress(rows, erased_here)
                if gone:
                    write_sealed_json(self._note(name), asdict(self._counted(report)))
        return erased

    def _counted(self, report: ImportReport) -> ImportReport:
        files = {kind: self.file(kind, report.name) for kind in KINDS}
        rows = {kind: len(read_jsonl(file)) for kind, file in files.items()}
        digests = {kind: digest_file(file) for kind, file in files.items() if file.exists()}
        return replace(report, rows=rows, files=digests, imported=len(self._traces_of(report.name)), bad_traces=())

    def _note(self, name: str) -> Path:
        return self.root / f"{name}.json"

    def _owners(self, but: str) -> dict[str, str]:
        """The import of each trace, by its id, of all imports except one."""
        return {trace: name for name in self.names() if name != but for trace in self._traces_of(name)}

    def _traces_of(self, name: str) -> set[str]:
        rows = (row for kind in KINDS for row in read_jsonl(self.file(kind, name)))
        return {origin["id"] for row in rows for origin in row[ORIGIN]}

    def _refuse(self, names: Iterable[str]) -> None:
        refused = self.forgotten()
        digests = sorted({*refused.digests, *map(refused.digest, names)})
        write_sealed_json(self.root / "forgotten" / "digests.json", {"digests": digests})

    def forgotten(self) -> "Forgotten":
        """What must not be imported again."""
        folder = self.root / "forgotten"
        key, digests = folder / "key", folder / "digests.json"
        if not key.exists():
            with atomic_path(key) as temp:
                temp.write_bytes(secrets.token_bytes(32))
        known = read_sealed_json(digests)["digests"] if digests.exists() else []
        return Forgotten(key.read_bytes(), frozenset(known))


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What must not be imported again, as keyed digests: without the key, no name can be guessed."""

    key: bytes
    digests: Collection[str]

    def digest(self, name: str) -> str:
        """The digest that stands for an id or a subject."""
        return hmac.new(self.key, name.encode(), hashlib.sha256).hexdigest()

    def has(self, trace: Trace) -> bool:
        """Whether the trace or its subject was forgotten."""
        return any(self.digest(name) in self.digests for name in (trace.trace_id, trace.subject) if name)


@dataclass(slots=True)
class _Chosen:
    """Sorts the traces of a source."""

    owners: dict[str, str]
    refused: Forgotten
    traces: dict[str, Trace] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    bad: list[BadTrace] = field(default_factory=list)
    forgotten: int = 0
    repeated: int = 0

    def add(self, found: Trace | BadTrace) -> None:
        """Count a trace that was read; keep it unless it is invalid, forgotten or of another import."""
        if isinstance(found, BadTrace):
            self.bad.append(found)
        elif self.refused.has(found):
            self.forgotten += 1
        elif (owner := self.owners.get(found.trace_id)) is not None:
            self.known[owner] = self.known.get(owner, 0) + 1
        else:
            self.repeated += found.trace_id in self.traces
            self.traces[found.trace_id] = found

    def check(self, request: ImportRequest) -> None:
        """Raise UserError if nothing could be read: the format is another one, and must not empty an import."""
        if self.bad and not (self.traces or self.known or self.forgotten):
            first = f"{self.bad[0].trace_id}: {self.bad[0].reason}"
            raise UserError(
                f"{request.source}: none of {len(self.bad):,} records is a trace of the format {request.format}; "
                f"the first: {first}"
            )


def name_of(source: str) -> str:
    """The name of an import whose user named none: that of its file, folder or server."""
    stem = Path(source).stem if "://" not in source else source.split("://", 1)[1]
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:64] or "import"


def redaction_for(reference: str | None) -> Redaction:
    """The redaction by the function that ``reference`` names. Raises UserError if it cannot be imported."""
    what = "the redaction"
    return Redaction(None if reference is None else load_object(reference, what), what)


def import_kind(path: str | None) -> str | None:
    """The kind of rows of a dataset's path if it is one that imports make: ``.../imports/tasks``, or a file there."""
    parts = Path(path or "").parts
    found = (kind for before, kind in pairwise(parts) if before == "imports" and kind in KINDS)
    return next(found, None)


def _check(request: ImportRequest) -> None:
    if request.format not in FORMATS:
        raise UserError(f"--format {request.format}: expected one of {', '.join(FORMATS)}")
    if not _NAME.fullmatch(request.name):
        raise UserError(f"--name {request.name}: expected lower-case letters, digits, '.', '_' and '-', at most 64")
    if request.link is not None and "{id}" not in request.link:
        raise UserError(f"--link {request.link}: expected {{id}} where the trace's id belongs")


def _stored(trace: Trace, request: ImportRequest, redaction: Redaction) -> Trace:
    """The trace as it may be stored: redacted, with its link."""
    link = trace.link if request.link is None else request.link.replace("{id}", trace.trace_id)
    texts = {"messages": [*trace.prompt, *trace.answer], "tools": trace.tools}
    changed = redaction.model_call(texts) or texts
    messages = changed["messages"]
    return replace(
        trace, link=link, prompt=messages[: len(trace.prompt)], answer=messages[len(trace.prompt) :],
        tools=changed["tools"], correction=redaction.text(trace.correction),
    )  # fmt: skip


def write_rows(file: Path, rows: list[Row]) -> None:
    """Write rows as JSON Lines; without rows there is no file."""
    if not rows:
        with removing(file):
            file.unlink(missing_ok=True)
        return
    with atomic_path(file) as temp:
        temp.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_jsonl(file: Path) -> list[Row]:
    """The rows of a file; none if it does not exist."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
