"""The platform's errors. Each class states the fault, whether a retry can help, and a hint what to do.

Every message names what was given, what was expected and what to do. ``fault_classification`` converts any other
exception to one of these.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, TypeAlias

from rft_platform.common.redaction import redact, visible

Fault: TypeAlias = Literal["user_code", "user_input", "engine", "trainer", "storage", "registry", "orchestration"]

#: Maximum number of names (of rows, parameters, files) in a message.
NAMED = 5

#: Hint of errors that are retried.
_REPEATED = "it is retried automatically with increasing delay"


class RftError(Exception):
    """Base of every error that the platform raises on purpose. Its text may quote user code: secrets are masked."""

    fault: ClassVar[Fault] = "orchestration"
    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = "find the cause in the run's log, fix it, then launch the job again"

    def __str__(self) -> str:
        return visible(redact(super().__str__()))


class UserError(RftError):
    """Bad input (config, data, model folder, port), refused before anything starts. The CLI exits with code 2."""

    fault = "user_input"
    hint = "correct the input that the message names, then launch the job again"


class UserCodeError(RftError):
    """The user's workflow or judge raised an exception, which is chained."""

    fault = "user_code"
    hint = "correct the workflow or the judge, then launch the job again, which loads the corrected code"


class JudgeUnavailableError(RftError):
    """A judge model does not answer, or its answers are unusable: the runs stay unjudged and get no reward."""

    fault = "user_code"
    retryable = True
    hint = f"{_REPEATED}; answers that were received are kept and not requested again"


class CheckFailedError(UserCodeError):
    """A blocking asset check refused the rows that workflow and judge produced."""

    hint = "read the failed check's metadata, correct the workflow or the judge, then launch the job again"


class TransientError(RftError):
    """A temporary failure between processes: a lost connection, a locked database, a process that died."""

    retryable = True
    hint = _REPEATED


class OutOfMemoryError(RftError):
    """A process of the control plane ran out of memory."""

    hint = "reduce the batch sizes or add memory, then launch the job again"


class EngineError(RftError):
    """The policy engine did not answer, or answered with an error."""

    fault = "engine"
    retryable = True
    hint = f"{_REPEATED}; an engine whose process died is restarted"


class WeightMismatchError(EngineError):
    """The weights do not fit the engine, or engine and trainer have different log-probs: the version is refused."""

    retryable = False
    hint = "the engine keeps serving its previous weights; compare engine and trainer on that checkpoint"


class WeightsAbsentError(EngineError):
    """The engine's machine does not see the folder of the weights."""

    retryable = False
    hint = "let that machine see RFT_HOME, or set store_url and its credentials, so that it can fetch weights"


class TrainerError(RftError):
    """The trainer group failed; it restarts from the last checkpoint."""

    fault = "trainer"
    retryable = True
    hint = f"{_REPEATED}; a trainer whose process died is restarted and begins at the parent checkpoint"


class TrainingCancelled(TrainerError):
    """A caller cancelled the training: nothing was published and the trainer holds the parent's state again."""

    retryable = False
    hint = "launch the job again to continue"


class NonFiniteError(TrainerError):
    """Loss or gradient became NaN or infinite: the step was refused and the state was kept."""

    retryable = False
    hint = "lower the learning rate or inspect the rows that the message names, then launch the job again"


class TrainerMemoryError(TrainerError):
    """The trainer ran out of memory. A retry would fail in the same way."""

    retryable = False
    hint = "lower trainer.max_token_len_per_gpu or train with LoRA, then launch the job again"


class StorageError(RftError):
    """A file of the store is missing, incomplete or does not match its digest."""

    fault = "storage"
    hint = "restore the file or create it again as the message says, then launch the job again"


class FileSystemError(StorageError):
    """The file system refused an operation, for example because it has no locks or is read-only."""

    hint = "repair the disk or its mount as the message says, then launch the job again"


class FileSystemDownError(FileSystemError):
    """A disk or network file system failed, temporarily or permanently; only a retry can show which."""

    retryable = True
    hint = _REPEATED


class DiskFullError(StorageError):
    """The disk is full. The previous file is kept; no incomplete file becomes visible."""

    hint = "free disk space, then launch the job again"


class StoreTakenError(StorageError):
    """Another home has continued the project from its object store: this one must not store anything more."""

    hint = "end the other driver before you start this home again; it then takes the files of the other one"


class DamagedError(StorageError):
    """A file is missing or differs from what was written; the platform may be able to regenerate it."""


class DamageRepairedError(DamagedError):
    """Damaged files were quarantined and the notes that depend on them removed, so that they are made again."""

    retryable = True
    hint = "the plan repeats the launch that created the files, then this one"


class PrerequisiteError(StorageError):
    """A stage was launched before what it reads was made."""

    retryable = True  # the plan retries it only after the earlier stage is done
    hint = "do what the message says, then launch the job again; the sensors do both if they are on"


class RegistryError(RftError):
    """MLflow did not answer, or answered with an error."""

    fault = "registry"
    retryable = True
    hint = f"{_REPEATED}; a published checkpoint is not trained again, only registered"


class RegistryLostError(RegistryError):
    """MLflow does not know a model version that the project registered: its database was deleted or replaced."""

    retryable = False
    hint = "restore MLflow's database, for example from mlflow.db.backup beside it, then launch the job again"


def some(names: Sequence[str]) -> str:
    """The first ``NAMED`` of ``names`` for a message, with ", ..." if there are more; "none" if there are none."""
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "") if names else "none"
