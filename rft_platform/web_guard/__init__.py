"""Access control of the platform's web servers: Host, Origin and token checks, and an ASGI middleware.

Read in this order:

- ``checks.py``: framework-neutral checks of one request (``check_host``, ``check_origin``, ``tokens_match``).
- ``token.py``: ``access_token``, the project's access token.
- ``asgi.py``: ``WebGuard``, the middleware that applies all of them; a browser exchanges the token for a cookie.
"""
