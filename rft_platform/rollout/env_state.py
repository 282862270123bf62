"""The identity of an environment's state."""

import hashlib
import json
from typing import Any

from rft_platform.errors import UserCodeError


def state_hash(state: Any) -> str | None:
    """A digest that equal states share, of text, bytes or a JSON value; None stays None (the state is not known).

    Raises UserCodeError for anything else: its equality could not be told from its text.
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
