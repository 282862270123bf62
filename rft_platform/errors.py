"""The platform's errors: who is at fault, whether a retry can help, and what happens next.

Every message names what was given, what was expected and what to do about it. ``rft_platform.faults`` turns any other
exception into one of these.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, TypeAlias

from rft_platform.redaction import redact

Fault: TypeAlias = Literal["user_code", "user_input", "engine", "trainer", "storage", "registry", "orchestration"]

#: Names (of rows, parameters, files) that a message spells out.
NAMED = 5

#: What a person reads below the cause of a failure that is retried.
_REPEATED = "it is retried automatically with increasing delay"


class RftError(Exception):
    """Base of every error the platform raises on purpose. Its text is masked: it may quote an error of user code."""

    fault: ClassVar[Fault] = "orchestration"
    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = "see the run's log for where it was raised, fix the cause, then launch the job again"

    def __str__(self) -> str:
        return redact(super().__str__())


class UserError(RftError):
    """Bad input (config, data, model folder, port): refused before anything starts. The CLI exits with code 2."""

    fault = "user_input"
    hint = "correct what the message names, then launch the job again"


class UserCodeError(RftError):
    """A workflow or a judge supplied by the user raised; the original exception is chained."""

    fault = "user_code"
    hint = "correct the workflow or the judge, then launch the job again; it runs the code as it is then"


class JudgeUnavailableError(RftError):
    """A model that judges does not answer, or answers nonsense: the runs stay unjudged, none gets a reward for it."""

    fault = "user_code"
    retryable = True
    hint = f"{_REPEATED}; answers that came are kept and not asked for again"


class CheckFailedError(UserCodeError):
    """A blocking asset check refused the rows that workflow and judge made."""

    hint = "see the failed check's metadata, correct the workflow or the judge, then launch the job again"


class TransientError(RftError):
    """Something between the parts (a connection, a locked database, a process that died) gave way for a moment."""

    retryable = True
    hint = _REPEATED


class OutOfMemoryError(RftError):
    """A process of the control plane ran out of memory."""

    hint = "make the batches smaller or give the machine more memory, then launch the job again"


class EngineError(RftError):
    """The policy engine did not answer, or answered with an error."""

    fault = "engine"
    retryable = True
    hint = f"{_REPEATED}; an engine that died is started again"


class WeightMismatchError(EngineError):
    """The engine's log-probs disagree with the trainer's for the same weights: the version was refused."""

    retryable = False
    hint = "the engine goes on serving what it served; compare engine and trainer on that checkpoint"


class TrainerError(RftError):
    """The trainer group failed; it restarts from the last checkpoint."""

    fault = "trainer"
    retryable = True
    hint = f"{_REPEATED}; a trainer that died is started again and begins at the parent checkpoint"


class TrainingCancelled(TrainerError):
    """A caller cancelled the training: nothing was published and the parent's state is held again."""

    retryable = False
    hint = "launch the job again to continue"


class NonFiniteError(TrainerError):
    """Loss or gradient became NaN or infinite: the step was refused and the state kept."""

    retryable = False
    hint = "lower the learning rate or look at the rows that the message names, then launch the job again"


class TrainerMemoryError(TrainerError):
    """The trainer ran out of memory, which it would do again."""

    retryable = False
    hint = "lower trainer.max_token_len_per_gpu or train with LoRA, then launch the job again"


class StorageError(RftError):
    """A file of the store is missing, half-written or does not match its digest."""

    fault = "storage"
    hint = "bring the file back or make it again as the message says, then launch the job again"


class FileSystemError(StorageError):
    """The file system refused an operation for a reason of its own, such as missing locks or mounts."""

    hint = "see to the disk or its mount as the message says, then launch the job again"


class FileSystemDownError(FileSystemError):
    """A disk or network file system failed for a moment, or for good: a retry tells."""

    retryable = True
    hint = _REPEATED


class DiskFullError(StorageError):
    """A write found no room. What stood there before still stands; nothing half-written is seen."""

    hint = "make room, then launch the job again"


class DamagedError(StorageError):
    """A file is not what was written; whoever could make it again finds the cause here."""


class DamageRepairedError(DamagedError):
    """Damaged files were set aside, and the notes that rested on them withdrawn: they are made again."""

    retryable = True
    hint = "the plan repeats the phase that made the files, then this one"


class RegistryError(RftError):
    """MLflow did not answer, or answered with an error of its own."""

    fault = "registry"
    retryable = True
    hint = f"{_REPEATED}; a checkpoint that was published is taken as it is and registered then"


class RegistryLostError(RegistryError):
    """MLflow does not know a model version that the project registered: its database was deleted or replaced."""

    retryable = False
    hint = "bring MLflow's database back or run `rft models rebuild`, then launch the job again"


def some(names: Sequence[str]) -> str:
    """The first few of ``names`` for a message, and that there are more."""
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "") if names else "none"
