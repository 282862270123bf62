"""The error with which a run ended that this process executed."""

import dagster as dg

from rft_platform.common.errors import CheckFailedError, RftError
from rft_platform.common.fault_classification import as_fault
from rft_platform.jobs.dagster_internals.masked_instance import AssetCheckFailedError


def run_error(raised: Exception) -> RftError:
    """The error that the asset raised; an error of Dagster itself is classified here."""
    if isinstance(raised, dg.Failure) and isinstance(raised.__cause__, RftError):
        return raised.__cause__
    if isinstance(raised, AssetCheckFailedError):
        return CheckFailedError(str(raised).strip())
    return as_fault(raised)
