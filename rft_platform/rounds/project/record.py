"""The record of a round: what its stages have made, as typed parts, each in a note of the round's folder.

``read(store, number)`` gives the record, whose parts are read from disk when they are used first; ``write`` stores a
part. A stage writes its part when it is complete, never before. No other module knows the names of notes or their keys;
only ``experience.selections`` knows one name, which is that of its file, too.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from rft_platform.common.errors import PrerequisiteError, StorageError, UserError
from rft_platform.common.files import digest_json
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.common.recorded_paths import from_record, to_record
from rft_platform.evaluation.comparison import Comparison
from rft_platform.evaluation.gate import RegressionResult
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.experience.file_ledger import ROLLOUTS, UNFINISHED
from rft_platform.experience.file_names import round_key
from rft_platform.experience.integrity import DamagedFile
from rft_platform.experience.notes import REPAIR
from rft_platform.experience.selections import ROW_SELECTION
from rft_platform.experience.store import ExperienceStore
from rft_platform.inference.canary import Canary
from rft_platform.judging.execution.experience_pipeline import OperatorReport
from rft_platform.training.protocol import StepEvent, TrainResult

BY_MODEL = "model"  #: kind of a judge that asks a model

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class Policy:
    """One set of weights and its origin: a round publishes one of each name, and explores with one of each name."""

    folder: str
    policy_version: int  # the project's optimiser steps when they were made; 0 is the starting policy
    weights_digest: str
    round: int  # the round that published it; 0 is the starting policy
    canary: Canary | None = None  # the trainer's log-probs for these weights on a few sequences
    model_version: str | None = None  # version in the model registry
    name: str = DEFAULT_POLICY


@dataclass(frozen=True, slots=True)
class Start:
    """The earlier policy that a round's training starts from, because newer ones were refused.

    It is settled before the round trains. A round without this part trains the policy of the round before.
    """

    round: int
    policy_version: int
    refused: list[int]  # policy versions that the weights do not descend from
    reason: str
    fresh_optimizer: bool  # the optimiser's state was not saved


@dataclass(frozen=True, slots=True)
class TaskBatches:
    """The tasks that a round has taken."""

    selector: str = ""
    first_batch: int = 0  # number of batches that earlier rounds took
    batches: int = 0
    statistics: dict[str, float] = field(default_factory=dict)  # of the selectors
    tasks: list[list[str]] = field(default_factory=list)  # ids by batch
    tasksets: dict[str, dict[str, float]] = field(default_factory=dict)  # tasks given, and epochs at the round's end


@dataclass(frozen=True, slots=True)
class Explored:
    """The rows of a round: of rollouts, or of production traffic."""

    rows: int = 0
    policy_version: int = 0  # of the default policy; traffic: the newest version
    older_groups: dict[str, int] = field(
        default_factory=dict
    )  # the version of the oldest token, of groups with older ones
    policy_round: int = 0
    weights_digest: str = ""
    workflow_code: str | None = None  # digest of the user's code
    task_selection: TaskBatches | None = None  # None: production traffic
    tokens_per_s: float | None = None
    seconds: float | None = None  # with the time to write the rows
    figures: dict[str, Any] = field(default_factory=dict)  # further ones, for people


@dataclass(frozen=True, slots=True)
class Judged:
    """The newest judgement of a round's rows."""

    judge_version: str = ""
    sound: bool = False  # only a sound judgement is put in force
    rows: int = 0
    mean_reward: float | None = None  # of the default policy, as the other figures
    judge_names: dict[str, str] = field(default_factory=dict)  # of all judgements of the round, by judge version
    judge_kinds: dict[str, str] = field(default_factory=dict)  # BY_MODEL or "code", by judge version
    judge_codes: dict[str, str | None] = field(default_factory=dict)  # digests of the user's code, by judge version
    judge_operators: dict[str, str | None] = field(default_factory=dict)  # ``operators_version``, by judge version
    judge_seconds: dict[str, float] = field(default_factory=dict)  # of the first judgement of each judge version
    judge_errors: int = 0
    own_rewards_replaced: int | None = None  # runs whose workflow set a reward that the judge's replaced
    operators: list[OperatorReport] = field(default_factory=list)
    operators_version: str | None = None
    restored: bool | None = None  # an earlier judgement was put in force again
    seconds: float | None = None
    figures: dict[str, Any] = field(default_factory=dict)  # further ones, for people

    def seconds_of(self, judge_version: str) -> float | None:
        """The time that a judgement of the round took; None if it was not recorded."""
        of_this = self.seconds if judge_version == self.judge_version and not self.restored else None
        return self.judge_seconds.get(judge_version, of_this)


@dataclass(frozen=True, slots=True)
class RowSelection:
    """The rows of a training, settled before it starts; a file beside the note names them one by one."""

    rows: dict[str, int] = field(default_factory=dict)  # by use
    judge_versions: dict[int, str] = field(default_factory=dict)  # of the rounds whose files the training reads
    sha256: str = ""  # of the file
    digest: str | None = None  # of the round's rows and judgement in force; None in the dynamic styles
    fresh_rounds: list[int] = field(default_factory=list)  # rounds with rows that no training took before
    parent_version: int = 0
    policy_versions: list[int] = field(default_factory=list)  # smallest and largest one that sampled a row
    staleness_mean: float = 0.0
    staleness_max: int = 0
    steps: int = 0  # expected optimiser steps
    landed: int = 0  # the last round considered
    left: dict[int, int] = field(default_factory=dict)  # rows left for a later training, by round
    last: bool = False  # no training follows
    settled_at: float = 0.0

    @property
    def through(self) -> int:
        """The last round up to which this training and earlier ones have taken all rows."""
        return min(self.left, default=self.landed + 1) - 1

    @property
    def rounds(self) -> list[int]:
        """The rounds whose files the training reads, ascending."""
        return sorted(self.judge_versions)


@dataclass(frozen=True, slots=True)
class Trained(TrainResult):
    """The result of a training and its steps."""

    step_events: list[StepEvent] = field(default_factory=list)
    engine_mismatch: float | None = None  # mean |delta log-prob| between engine and trainer, in nats
    lineage: dict[str, Any] = field(default_factory=dict)  # origin of the weights, as in the checkpoint's manifest


@dataclass(frozen=True, slots=True)
class RoundEvaluation:
    """Outcome of a round's evaluation. ``results`` is empty if no evaluation was due."""

    gate: str = ""
    gate_summary: str = ""  # why the gate did not pass, in a few words; empty if ``gate`` is short itself
    promoted: bool = False
    gate_passed: bool | None = None  # None: this evaluation has no decision of the gate
    results: list[EvaluationResult] = field(default_factory=list)  # by held-out taskset
    metrics: dict[str, float] = field(default_factory=dict)
    compared: list[Comparison] = field(default_factory=list)  # with the previous policy, the champion and the start
    regression: RegressionResult | None = None  # on the regression set; None: there is none, or this is the start
    promoted_because: str | None = None  # a person's reason
    rolled_back_at: str | None = None
    released: bool | None = None  # on a host that only serves: the decision of the host that trains
    markdown: Annotated[str, Field(exclude=True)] = ""  # the report; its file beside the note is the stored one
    curve: Annotated[str, Field(exclude=True)] = ""  # the learning curve as a small picture in Markdown

    @property
    def first(self) -> EvaluationResult | None:
        """The result on the first held-out taskset, which the gate decides on."""
        return self.results[0] if self.results else None


@dataclass(frozen=True, slots=True)
class WarmStartRun:
    """The warm start of round 0."""

    steps: int
    curve: list[dict[str, float]]
    data_digest: str


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """The corrections of production traffic that an online round collected."""

    rows: int
    sha256: str | None  # of their file; None without rows


@dataclass(frozen=True, slots=True)
class DatasetFile:
    """The dataset of an offline training, and its origin."""

    path: str
    rows: int
    bytes: int
    sha256: str
    digest: str  # of the rows in order: the data version
    source: str  # as configured
    source_files: dict[str, str]  # SHA-256 of each; empty for a dataset of the hub
    report: dict[str, Any]  # what was read and what was left out
    erased: int = 0  # rows that `rft forget` has erased from the file; ``rows`` and ``digest`` are those of before

    @property
    def source_digest(self) -> str | None:
        """SHA-256 of the source file, or the digest of all SHA-256 values if there are several files."""
        digests = list(self.source_files.values())
        return digests[0] if len(digests) == 1 else digest_json(digests) if digests else None


@dataclass(frozen=True, slots=True)
class Taken:
    """On a host that only serves: which revision of the round's published record was taken."""

    revision: int


Part = (
    Policy | Start | Explored | Judged | RowSelection | Trained | RoundEvaluation | WarmStartRun | Demonstrations
    | DatasetFile | Taken
)  # fmt: skip

_SNAPSHOT = "snapshot"
_NOTES: dict[type[Part], str] = {
    Start: "start",
    Explored: "explore",
    Judged: "judge",
    RowSelection: ROW_SELECTION,
    Trained: "train",
    Policy: "policy",
    RoundEvaluation: "evaluation",
    WarmStartRun: "warm_start",
    Demonstrations: "demonstrations",
    DatasetFile: "dataset",
    Taken: "exchange",
}
_OF_A_POLICY = {_SNAPSHOT, *(_NOTES[kind] for kind in (RowSelection, Trained, Policy))}
_PATHS: dict[type, str] = {Policy: "folder", Trained: "checkpoint", DatasetFile: "path"}  # stored relative to the home


class _Stored(Generic[_Kind]):
    """An attribute of ``RoundRecord``: a part that the round has once, and not for each policy."""

    def __init__(self, kind: type[_Kind]) -> None:
        self._kind = kind

    def __get__(self, record: "RoundRecord", _: type) -> _Kind | None:
        return record._read(self._kind)


class RoundRecord:
    """What a round's stages have made so far. A part is read once, when it is used first; None: not made yet."""

    start = _Stored(Start)
    explored = _Stored(Explored)
    judged = _Stored(Judged)
    evaluated = _Stored(RoundEvaluation)  # it ends the round
    demonstrations = _Stored(Demonstrations)
    dataset = _Stored(DatasetFile)
    taken = _Stored(Taken)

    def __init__(self, store: ExperienceStore, number: int) -> None:
        self._store = store
        self.number = number
        self._known: dict[str, Any] = {}

    def snapshot(self, policy: str = DEFAULT_POLICY) -> Policy | None:
        """The policy that explores."""
        return self._read(Policy, policy, _SNAPSHOT)

    def selection(self, policy: str = DEFAULT_POLICY) -> RowSelection | None:
        """The rows of the training."""
        return self._read(RowSelection, policy)

    def trained(self, policy: str = DEFAULT_POLICY) -> Trained | None:
        """The training."""
        return self._read(Trained, policy)

    def published(self, policy: str = DEFAULT_POLICY) -> Policy | None:
        """The policy that the round ended with; round 0 has the starting policy."""
        return self._read(Policy, policy)

    def started_again(self, policy: str = DEFAULT_POLICY) -> Start | None:
        """Where the training starts again; None if it starts from the policy of the round before."""
        return self.start if policy == DEFAULT_POLICY else None

    def has(self, kind: type[Part], policy: str = DEFAULT_POLICY) -> bool:
        """Whether a part was made; costs a single file system call."""
        return self._store.has_note(self.number, _name(_NOTES[kind], policy))

    def has_snapshot(self, policy: str = DEFAULT_POLICY) -> bool:
        """Whether the policy that explores was chosen."""
        return self._store.has_note(self.number, _name(_SNAPSHOT, policy))

    def file(self, kind: type[Part], policy: str = DEFAULT_POLICY) -> Path:
        """The note of a part; it may not exist."""
        return self._store.round_folder(self.number) / f"{_name(_NOTES[kind], policy)}.json"

    def check(self, name: str) -> None:
        """Read a note, a part or not. Raises StorageError if it cannot be read, DamagedError if it was changed."""
        note, _, policy = name.partition("-")
        kinds = {note: kind for kind, note in _NOTES.items()} | {_SNAPSHOT: Policy}
        if note in kinds and _name(note, policy) == name:
            self._read(kinds[note], policy, note)
        else:
            self._store.read_note(self.number, name)

    def _read(self, kind: type[_Kind], policy: str = DEFAULT_POLICY, note: str = "") -> _Kind | None:
        name = _name(note or _NOTES[kind], policy)  # type: ignore[index]
        if name not in self._known:
            value = self._store.read_note(self.number, name)
            try:
                self._known[name] = None if value is None else decoded(kind, value, self._store.home)
            except ValidationError as error:
                path, first = self._store.round_folder(self.number) / f"{name}.json", error.errors()[0]
                said = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
                raise StorageError(f"{path}: cannot be read ({said}): {REPAIR}") from error
        found: _Kind | None = self._known[name]
        return found


def read(store: ExperienceStore, number: int) -> RoundRecord:
    """The record of a round. Its parts raise StorageError if they cannot be read, DamagedError if they were changed."""
    return RoundRecord(store, number)


def write(store: ExperienceStore, number: int, part: Part, policy: str = DEFAULT_POLICY) -> None:
    """Store a part of a round; the stage that made it is complete now."""
    store.write_note(number, _name(_NOTES[type(part)], policy), encoded(part, store.home))


def write_snapshot(store: ExperienceStore, number: int, policy: Policy) -> None:
    """Store the policy that a round explores with."""
    store.write_note(number, _name(_SNAPSHOT, policy.name), encoded(policy, store.home))


def publish(store: ExperienceStore, policy: Policy) -> None:
    """Record the policy that a round ended with; from now on later rounds may explore with it."""
    write(store, policy.round, policy, policy.name)


def published(store: ExperienceStore, round_number: int, name: str = DEFAULT_POLICY) -> Policy | None:
    """The policy ``name`` that a round published, or None."""
    return read(store, round_number).published(name)


def refuse_if_next_round_is_trained(store: ExperienceStore, round_number: int) -> None:
    """Raise UserError if the next round is trained."""
    if published(store, round_number + 1) is not None:
        raise UserError(
            f"{round_key(round_number)} cannot be trained again, because the next round was trained after it: "
            "judge it again to compare judges, or start a project with another name"
        )


def refuse_if_rows_are_read(store: ExperienceStore, round_number: int) -> None:
    """Raise UserError if an exploration of a complete round would replace rows that a training reads or has read.

    A settled selection counts, whether or not its training has ended, unless the judgement was replaced by an unsound
    one, so that the training cannot continue. Rounds with damaged rollouts that were set aside may be explored again.
    """
    record = read(store, round_number)
    explored, judged, training = record.explored, record.judged, _first_reader(store, round_number)
    if explored is None or judged is None or training is None or store.count_written(round_number) < explored.rows:
        return
    if not judged.sound and not RoundRecord(store, training).has(Policy):
        return
    raise UserError(
        f"{round_key(round_number)} cannot be explored again, because the training of {round_key(training)} reads its "
        "rows, which new ones would replace: judge it again to compare judges, or if its judgement is missing; start a "
        "project with another name to sample again; if its rollouts are damaged, run `rft store check --set-aside` "
        "first"
    )


def _first_reader(store: ExperienceStore, round_number: int) -> int | None:
    """The first training, of any policy, whose selection names the rows of a round."""
    for number in store.rounds():
        record = RoundRecord(store, number)
        for name in store.notes(number):
            note, _, policy = name.partition("-")
            selection = record.selection(policy) if note == ROW_SELECTION else None
            if selection is not None and round_number in selection.judge_versions:
                return number
    return None


def required(store: ExperienceStore, round_number: int, name: str = DEFAULT_POLICY) -> Policy:
    """The policy that a round published. Raises PrerequisiteError if there is none."""
    policy = published(store, round_number, name)
    if policy is None:
        raise PrerequisiteError(f"{round_key(round_number)} has published no policy: run sync_round_job for it first")
    return policy


def parent_of(store: ExperienceStore, round_number: int, name: str = DEFAULT_POLICY) -> Policy:
    """The policy that a round's training starts from: that of the round before, or an earlier one."""
    number = parent_round(store, round_number, name)
    return needed(published(store, number, name), round_number, number)


def parent_round(store: ExperienceStore, round_number: int, name: str = DEFAULT_POLICY) -> int:
    """The round whose policy a round's training starts from."""
    start = read(store, round_number).started_again(name)
    return round_number - 1 if start is None else start.round


def steps_before(store: ExperienceStore, round_number: int, name: str = DEFAULT_POLICY) -> int:
    """The project's optimiser steps before a round: the largest policy version of earlier rounds.

    It is larger than the parent's version if the training starts again from an earlier policy.
    """
    for number in range(round_number - 1, 0, -1):
        trained = read(store, number).trained(name)
        if trained is not None and trained.steps:
            return trained.policy_version
    return 0


def snapshot_of(store: ExperienceStore, round_number: int, name: str = DEFAULT_POLICY) -> Policy:
    """The policy that a round explores with: its snapshot. Raises PrerequisiteError if none was chosen yet."""
    policy = read(store, round_number).snapshot(name)
    if policy is None:
        raise PrerequisiteError(
            f"{round_key(round_number)} has no policy snapshot: materialise policy_snapshot for it first"
        )
    return policy


def needed(policy: Policy | None, round_number: int, oldest: int) -> Policy:
    """``policy``; PrerequisiteError that names what to run if ``round_number`` has none of ``oldest`` or later."""
    if policy is None:
        raise PrerequisiteError(
            f"{round_key(round_number)} needs a policy of {round_key(oldest)} or later, and there is none: "
            + ("run warm_start_job first" if oldest == 0 else f"run sync_round_job for {round_key(oldest)} first")
        )
    return policy


def withdraw(store: ExperienceStore, number: int, kind: type[Part], policy: str = DEFAULT_POLICY) -> None:
    """Move the note of a part aside, so that its stage counts as not done."""
    store.withdraw_note(number, _name(_NOTES[kind], policy))


def set_aside(store: ExperienceStore, number: int, file: DamagedFile) -> Path:
    """Move a damaged file of a round to ``aside/`` and withdraw the parts that depend on it; returns the new path.

    A round that has trained keeps its parts, because its stages are not repeated.
    """
    dependents: dict[str, tuple[type[Part], ...]] = {ROLLOUTS: (Explored, Judged), UNFINISHED: ()}
    dependent = dependents.get(file.path.parent.name, (Judged,))
    trained = RoundRecord(store, number).has(Policy)
    return store.set_aside(number, file.path, file.why, () if trained else [_NOTES[kind] for kind in dependent])


def move_folders(store: ExperienceStore, moved: Mapping[str, str]) -> None:
    """Change the folders of recorded policies: a base model outside the home was ``moved`` from one path to another."""
    for number in store.rounds():
        for name in store.notes(number):
            if name.partition("-")[0] in (_SNAPSHOT, _NOTES[Policy]):
                note = store.read_note(number, name)
                if note is not None and note["folder"] in moved:
                    store.write_note(number, name, {**note, "folder": moved[note["folder"]]})


def change_policies(store: ExperienceStore, change: Callable[[Policy], Policy]) -> None:
    """Replace recorded policies of all rounds, the published ones and their copies in snapshots, by ``change``.

    The notes decide which policies there are: the configuration may name fewer than before.
    """
    for number, name, found in _policies(store):
        if (changed := change(found)) != found:
            store.write_note(number, name, encoded(changed, store.home))


def drop_canaries(store: ExperienceStore, number: int) -> None:
    """Remove the canaries of a round's policies: they are tokens of the rows or tasks that the round trained on.

    Copies of them have the same weights: snapshots, and policies of later rounds that trained nothing.
    """
    weights = {policy.weights_digest for _, _, policy in _policies(store) if policy.round == number}
    change_policies(store, lambda policy: replace(policy, canary=None) if policy.weights_digest in weights else policy)


def _policies(store: ExperienceStore) -> Iterator[tuple[int, str, Policy]]:
    """The recorded policies of all rounds: the round, the note's name, and the policy."""
    for number in store.rounds():
        record = RoundRecord(store, number)
        for name in store.notes(number):
            note, _, policy = name.partition("-")
            if note in (_SNAPSHOT, _NOTES[Policy]):
                found = record.snapshot(policy) if note == _SNAPSHOT else record.published(policy)
                if found is not None:
                    yield number, name, found


def damaged_notes(store: ExperienceStore, number: int) -> Iterator[DamagedFile | None]:
    """One entry for each note of a round: None if it is intact."""
    record = RoundRecord(store, number)
    for name in store.notes(number):
        path = store.round_folder(number) / f"{name}.json"
        try:
            record.check(name)
            yield None
        except StorageError as error:
            yield DamagedFile(path, str(error).removeprefix(f"{path}: ").removesuffix(f": {REPAIR}"))


def all_figures(part: Explored | Judged) -> dict[str, Any]:
    """A part with all its figures by name, for people and metrics.

    Left out is what was not measured, and the times of other judgements, which have a judge's digest for a name.
    """
    values = {name: value for name, value in asdict(part).items() if value is not None and name != "judge_seconds"}
    figures: dict[str, Any] = values.pop("figures")
    return values | figures


def encoded(part: Part, home: Path) -> dict[str, Any]:
    """A part as plain JSON values; a path below ``home`` is stored relative to it."""
    values: dict[str, Any] = _adapter(part.__class__).dump_python(part)
    if (name := _PATHS.get(type(part))) is not None:
        values[name] = to_record(values[name], home)
    return values


def decoded(kind: type[_Kind], values: Mapping[str, Any], home: Path) -> _Kind:
    """The part that ``encoded`` converted; ``home`` is the project's current folder, which may have moved."""
    if (name := _PATHS.get(kind)) is not None and name in values:
        values = {**values, name: str(from_record(values[name], home))}
    part: _Kind = _adapter(kind).validate_python(values)
    return part


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(kind: type) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:  # building one takes milliseconds
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def _name(note: str, policy: str) -> str:
    return f"{note}-{policy}" if note in _OF_A_POLICY else note
