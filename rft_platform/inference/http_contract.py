"""What engine servers and their HTTP clients agree on: the keys of the OpenAI APIs and the keep-alive time.

Standard library only: it is also imported in agents' own environments.
"""

import hashlib
import hmac

NO_KEY = "EMPTY"  # for servers that require no key: OpenAI's clients refuse an empty one
KEEP_ALIVE_S = 600  # longer than clients keep idle connections, so that the server closes none just as it is reused


def api_key_of(token: str) -> str:
    """The key of an engine's OpenAI API, derived from the ``token`` of its lease; ``NO_KEY`` if that is empty.

    The key permits model calls, but not calls to the control plane.
    """
    return "rft-" + hmac.new(token.encode(), b"OpenAI API", hashlib.sha256).hexdigest() if token else NO_KEY
