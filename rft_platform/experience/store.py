"""The Parquet store of experiences: one folder per round, files written atomically and identified by digest."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote

import pyarrow as pa

from rft_platform.common.errors import DamagedError, StorageError
from rft_platform.common.files import digest_json, read_sealed_json, write_sealed_json
from rft_platform.experience import integrity, schema
from rft_platform.experience.file_ledger import JUDGED, ROLLOUTS, UNFINISHED, Contents, FileEntry, Ledger
from rft_platform.experience.file_names import batch_file, batches_in, round_key
from rft_platform.experience.integrity import DamagedFile
from rft_platform.experience.notes import RoundNotes
from rft_platform.experience.parquet import read_table, read_tables, unreadable, write_table
from rft_platform.experience.record import JudgedRow, RolloutRow
from rft_platform.experience.schema import check_judge, check_lengths, check_round, check_unique
from rft_platform.object_store.mirror import removing, restore_stored

_CURRENT = f"{JUDGED}/current.json"
_LOG = logging.getLogger(__name__)


class ExperienceStore(RoundNotes):
    """Rollouts, judgements and notes of every round below one folder.

    Layout::

        r0001/files.json                     the ledger: the stored files and their digests
        r0001/rollouts/batch-0000.parquet    one file an explore batch
        r0001/unfinished/batch-0000.parquet  answers of the batch that the next batch continues
        r0001/judged/<judge version>.parquet one file a judge version
        r0001/judged/current.json            names the judgement in force
        r0001/<name>.json                    notes: explore, train, evaluation, ...
        r0001/aside/                         damaged files, each with the reason
    """

    def ledger(self, round: int) -> Ledger:
        """The ledger of a round."""
        return Ledger(self.round_folder(round))

    # --- rollouts

    def write_rollouts(self, round: int, batch: int, rows: Sequence[RolloutRow]) -> Path:
        """Write the rows of one explore batch; writing the same batch again replaces its file.

        Raises ``ValueError`` naming the row if lengths differ, a row belongs to another round, or a ``row_id`` occurs
        twice in the batch or also in another batch of the round; ``StorageError`` for a batch of a round that was
        compacted or retired.
        """
        return self.write_rollout_table(round, batch, schema.rows_to_table(rows))

    def write_rollout_table(self, round: int, batch: int, table: pa.Table) -> Path:
        """Like ``write_rollouts``, for a table of ``ROLLOUT_SCHEMA``."""
        name = f"{ROLLOUTS}/{batch_file(batch)}"
        check_lengths(table)
        check_round(table, round)
        check_unique(table)
        ledger = self.ledger(round)
        with ledger.change() as contents:
            _check_open(contents, round, batch)
            others = [ledger.folder / other for other in contents.rollouts() if other != name]
            check_unique(table, [read_table(other, schema.ROLLOUT_SCHEMA, ["row_id"]) for other in others])
            return ledger.land(contents, name, partial(write_table, table))

    def rollout_files(self, round: int) -> list[Path]:
        """The stored rollout files of a round, in batch order."""
        ledger = self.ledger(round)
        return [ledger.folder / name for name in ledger.read().rollouts()]

    def batches(self, round: int) -> list[int]:
        """Numbers of the stored explore batches, ascending."""
        return [number for path in self.rollout_files(round) for number in batches_in(path.name)]

    def read_rollouts(self, round: int, columns: list[str] | None = None) -> pa.Table:
        """Rollouts of a round as one table (empty if there are none); ``columns`` limits what is read.

        Raises StorageError for a round whose rollouts were retired.
        """
        ledger = self.ledger(round)
        contents = ledger.read()
        if contents.retired:
            raise StorageError(f"{round_key(round)}: {contents.retirement(self.home)}")
        return read_tables([ledger.folder / name for name in contents.rollouts()], schema.ROLLOUT_SCHEMA, columns)

    def rollout_rows(self, round: int) -> list[RolloutRow]:
        """Rollouts of a round as records, in batch order."""
        return schema.table_to_rows(self.read_rollouts(round))

    def rows_are_here(self, round: int) -> bool:
        """Whether all rows and judgements of a round are on this host, so that reading them fetches nothing."""
        return all(path.exists() for path in (*self.rollout_files(round), *self.judged_files(round)))

    def count_written(self, round: int) -> int:
        """Number of rows in the rollout files of a round as they were first written, also of retired files."""
        contents = self.ledger(round).read()
        entries = {name: retired.entry for name, retired in contents.retired.items()} | contents.files
        names = contents.rollouts(retired=True)
        return sum(source.rows for name in names for source in entries[name].sources(name))

    def count_rollouts(self, round: int) -> int:
        """Number of rollout rows of a round, read from the ledger only."""
        contents = self.ledger(round).read()
        return sum(contents.files[name].rows for name in contents.rollouts())

    # --- unfinished answers

    def write_unfinished(self, round: int, batch: int, rows: Sequence[RolloutRow]) -> None:
        """Write the answers that the next explore batch continues, as far as they were sampled, one row each.

        An answer that has not ended has the finish reason ``abort``. Writing the same batch again replaces its file.
        """
        table = schema.rows_to_table(rows)
        check_lengths(table)
        check_round(table, round)
        ledger = self.ledger(round)
        with ledger.change() as contents:
            ledger.land(contents, _unfinished_name(batch), partial(write_table, table))

    def unfinished_rows(self, round: int, batch: int) -> list[RolloutRow]:
        """The unfinished answers of an explore batch; none if none were stored or their file is gone or damaged."""
        ledger, name = self.ledger(round), _unfinished_name(batch)
        if name not in ledger.read().files:
            return []
        try:
            return schema.table_to_rows(read_table(ledger.folder / name, schema.ROLLOUT_SCHEMA))
        except StorageError as error:
            _LOG.warning("%s: its tasks are not continued", error)
            return []

    # --- judgements

    def write_judged(
        self, round: int, judge_version: str, rows: Sequence[JudgedRow], *, make_current: bool = True
    ) -> Path:
        """Write a judgement of a round and by default make it the current one; the same version replaces its file.

        Raises ``ValueError`` naming the row if a ``row_id`` occurs twice or a row has another judge version.
        """
        return self.write_judged_table(round, judge_version, schema.judged_to_table(rows), make_current=make_current)

    def write_judged_table(self, round: int, judge_version: str, table: pa.Table, *, make_current: bool = True) -> Path:
        """Like ``write_judged``, for a table of ``JUDGED_SCHEMA``."""
        check_judge(table, judge_version)
        check_unique(table)
        ledger = self.ledger(round)
        with ledger.change() as contents:
            path = ledger.land(contents, _judged_name(judge_version), partial(write_table, table))
        if make_current:
            self.put_in_force(round, judge_version)
        return path

    def put_in_force(self, round: int, judge_version: str) -> None:
        """Make a stored judgement the current one, which training reads. Raises StorageError if it is not stored."""
        folder, name = self.round_folder(round), _judged_name(judge_version)
        entry = self.ledger(round).read().files.get(name)
        if entry is None:
            raise StorageError(f"{folder / name}: is not recorded as stored: judge round {round_key(round)} first")
        write_sealed_json(folder / _CURRENT, {"judge_version": judge_version, "rows": entry.rows})

    def current_file(self, round: int) -> Path:
        """Path of the document that names the current judgement; it may not exist."""
        return self.round_folder(round) / _CURRENT

    def judge_version(self, round: int) -> str | None:
        """The current judge version, or ``None`` before the first judgement."""
        path = self.round_folder(round) / _CURRENT
        try:
            return str(read_sealed_json(path)["judge_version"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise unreadable(path, error) from error

    def judge_versions(self, round: int) -> list[str]:
        """Every judge version of a round's judgements, in alphabetical order."""
        return sorted(unquote(path.stem) for path in self.judged_files(round))

    def judged_file(
        self, round: int, judge_version: str | None = None, *, contents: Contents | None = None
    ) -> Path | None:
        """File of a judgement (default: the current one), or ``None`` if there is none.

        ``contents``: the ledger's contents, if the caller has already read them.
        """
        version = judge_version or self.judge_version(round)
        if version is None:
            return None
        name = _judged_name(version)
        path = self.round_folder(round) / name
        if name in (contents or self.ledger(round).read()).files and self.is_stored(path):
            return path
        if judge_version is None:
            raise StorageError(f"{path}: named by current.json but missing: judge round {round_key(round)} again")
        return None

    def in_force_file(self, round: int) -> Path | None:
        """Path of the current judgement, whether or not the file exists; ``None`` before the first judgement."""
        version = self.judge_version(round)
        return None if version is None else self.round_folder(round) / _judged_name(version)

    def judged_files(self, round: int) -> list[Path]:
        """Files of all judgements of a round, of any judge version."""
        ledger = self.ledger(round)
        return [ledger.folder / name for name in ledger.read().judgements()]

    def read_judged(self, round: int, judge_version: str | None = None, columns: list[str] | None = None) -> pa.Table:
        """A judgement of a round as a table (empty if there is none); default: the current one."""
        path = self.judged_file(round, judge_version)
        return read_tables([path] if path else [], schema.JUDGED_SCHEMA, columns)

    def judged_rows(self, round: int, judge_version: str | None = None) -> list[JudgedRow]:
        """A judgement of a round as records."""
        return schema.table_to_judged(self.read_judged(round, judge_version))

    def count_judged(self, round: int, judge_version: str | None = None) -> int:
        """Number of judged rows, read from the ledger only, even if the file is missing; 0 without a judgement."""
        version = judge_version or self.judge_version(round)
        if version is None:
            return 0
        entry = self.ledger(round).read().files.get(_judged_name(version))
        return 0 if entry is None else entry.rows

    def count_kept(self, round: int) -> int:
        """Number of rows of the current judgement that no filter dropped, read from the ledger only."""
        path = self.in_force_file(round)
        entry = None if path is None else self.ledger(round).read().files.get(f"{JUDGED}/{path.name}")
        return 0 if entry is None else entry.rows if entry.kept is None else entry.kept

    # --- integrity

    def entry(self, round: int, path: Path) -> FileEntry:
        """The ledger entry of a file; raises StorageError if the ledger has none."""
        entry = self.ledger(round).read().files.get(str(path.relative_to(self.round_folder(round))))
        if entry is None:
            raise StorageError(
                f"{path}: is not recorded as stored, so there is no digest to compare it with: produce it again"
            )
        return entry

    def digest(self, round: int, *, judge_version: str | None = None, verify: bool = False) -> str:
        """SHA-256 over a round's rollout files and a judgement (default: the current one), as originally written.

        The digest identifies what a training read; compaction and retirement do not change it. With ``verify``
        the files are read and compared with their digests; raises DamagedError naming those that differ.
        """
        contents, judged = self.ledger(round).read(), self.judged_file(round, judge_version)
        if verify:
            self.check(round, digest=True)
        entries = {name: retired.entry for name, retired in contents.retired.items()} | contents.files
        names = [*contents.rollouts(retired=True), *([f"{JUDGED}/{judged.name}"] if judged else [])]
        return digest_json([digest for name in names for digest in entries[name].digests])

    def rollouts_digest(self, round: int) -> str:
        """SHA-256 over a round's rollout files alone; a judgement does not change it."""
        contents = self.ledger(round).read()
        entries = {name: retired.entry for name, retired in contents.retired.items()} | contents.files
        return digest_json([digest for name in contents.rollouts(retired=True) for digest in entries[name].digests])

    def damaged(self, round: int, *, digest: bool) -> list[DamagedFile]:
        """Files of a round that are missing, truncated or unreadable; with ``digest`` also files with changed bytes."""
        return integrity.damaged(self.round_folder(round), digest=digest)

    def damaged_sizes(self, round: int, contents: Contents) -> list[Path]:
        """Files of ``contents`` that are missing or have another size; no file is opened."""
        files = ((self.round_folder(round) / name, entry.bytes) for name, entry in contents.files.items())
        return [path for path, size in files if self.stored_size(path) != size]

    def check(self, round: int, *, digest: bool) -> None:
        """Raise DamagedError naming the damaged files of a round, if there are any."""
        found = self.damaged(round, digest=digest)
        if found:
            raise DamagedError("\n".join(f"{file.path}: {file.why}" for file in found))

    def restore(self, round: int, path: Path) -> bool:
        """Replace a damaged file by the intact one on the project's object store; False if there is none."""
        ledger = self.ledger(round)
        if path.parent == ledger.folder or path == self.current_file(round):
            return restore_stored(path)
        with ledger.change() as contents:
            entry = contents.files.get(str(path.relative_to(ledger.folder)))
            return entry is not None and restore_stored(path, entry.sha256)

    def set_aside(self, round: int, path: Path, why: str, notes: Sequence[str] = ()) -> Path:
        """Move a damaged file to ``aside/`` and withdraw the notes that depend on it, so that their stages repeat.

        Without ``notes`` no note is withdrawn, because the stages are not repeated; a damaged judgement is no longer
        the active one. Returns the file's new path.
        """
        ledger = self.ledger(round)
        if path.parent == ledger.folder or path == self.current_file(round):
            return integrity.set_document_aside(ledger.folder, path, why)
        with ledger.change() as contents:
            self._withdraw(round, path, notes)  # first: a crash must not leave notes without their file
            return integrity.set_rows_aside(ledger, contents, path, why)

    def _withdraw(self, round: int, path: Path, notes: Sequence[str]) -> None:
        judged = path.parent.name == JUDGED
        if judged and path != self.in_force_file(round):
            return
        for note in notes:
            self.withdraw_note(round, note)
        if judged or notes:  # last: after a crash before this line, a repeat withdraws the notes
            with removing(self.current_file(round)):
                self.current_file(round).unlink(missing_ok=True)


def _check_open(contents: Contents, round: int, batch: int) -> None:
    """Refuse new rollouts for a round that was compacted or retired: they would change the round."""
    settled = "retired" if contents.retired else "compacted" if any(e.made_of for e in contents.files.values()) else ""
    if settled:
        raise StorageError(
            f"{round_key(round)}: batch {batch} cannot be written, because the round's rollouts were {settled}: "
            "a closed round cannot be explored again; start a project with another name"
        )


def _unfinished_name(batch: int) -> str:
    return f"{UNFINISHED}/{batch_file(batch)}"


def _judged_name(judge_version: str) -> str:
    return f"{JUDGED}/{quote(judge_version, safe=' @+=,')}.parquet"
