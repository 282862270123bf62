"""Digests of environment states, by which equal states are recognised."""

import hashlib
import json
from typing import Any

from rft_platform.errors import UserCodeError


def state_hash(state: Any) -> str | None:
    """Return a digest of text, bytes or a JSON value, the same for equal states; None (unknown state) stays None.

    Raises UserCodeError for other types: their text does not determine whether they are equal.
    """
    if state is None:
        return None
    if not isinstance(state, bytes):
        try:
            state = json.dumps(state, sort_keys=True, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise UserCodeError(
                f"set_env_state was given {type(state).__name__}: {error}; give text, bytes or a JSON value"
            ) from error
    return hashlib.sha256(state).hexdigest()[:32]
