"""Keys of the engines' OpenAI APIs. Imports nothing but the standard library: an agent's environment has little."""

import hashlib
import hmac

NO_KEY = "EMPTY"  # for servers that ask for none: OpenAI's clients refuse to be without a key


def api_key_of(token: str) -> str:
    """The key of an engine's OpenAI API, derived from the ``token`` of its lease; ``NO_KEY`` where that is empty.

    Model calls need no more than this key, and it does not open the control plane.
    """
    return "rft-" + hmac.new(token.encode(), b"OpenAI API", hashlib.sha256).hexdigest() if token else NO_KEY
