"""The platform's errors: who is at fault and whether a retry can help.

Every message names what was given, what was expected and what to do about it.
"""


class RftError(Exception):
    """Base of every error the platform raises on purpose."""

    retryable = False


class UserError(RftError):
    """Bad input (config, data, model folder, port): refused before anything starts. The CLI exits with code 2."""


class UserCodeError(RftError):
    """A workflow or a judge supplied by the user raised; the original exception is chained."""


class EngineError(RftError):
    """The policy engine did not answer, or answered with an error."""

    retryable = True


class WeightMismatchError(EngineError):
    """The engine's log-probs disagree with the trainer's for the same weights: the version was refused."""

    retryable = False


class TrainerError(RftError):
    """The trainer group failed; it restarts from the last checkpoint."""

    retryable = True


class TrainingCancelled(TrainerError):
    """A caller cancelled the training: nothing was published and the parent's state is held again."""

    retryable = False


class NonFiniteError(TrainerError):
    """Loss or gradient became NaN or infinite: the step was refused and the state kept."""

    retryable = False


class StorageError(RftError):
    """A file of the store is missing, half-written or does not match its digest."""
