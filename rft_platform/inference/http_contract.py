"""Constants and keys that engine servers and their HTTP clients share: API keys and the keep-alive time.

Standard library only: agents import this module in their own environments too.
"""

import hashlib
import hmac

NO_KEY = "EMPTY"  # for servers that require no key: OpenAI's clients refuse an empty key
KEEP_ALIVE_S = 600  # longer than clients keep idle connections, so that the server closes none that a client reuses


def api_key_of(token: str) -> str:
    """The key of an engine's OpenAI API, derived from the ``token`` of its lease; ``NO_KEY`` if ``token`` is empty.

    The key permits model calls, but not calls to the control plane.
    """
    return "rft-" + hmac.new(token.encode(), b"OpenAI API", hashlib.sha256).hexdigest() if token else NO_KEY
