"""Server parts that both engines share; the trainer and the gateways use some of them too.

Read in this order:

- ``control_api.py``: the ``/engine/*`` routes of the control plane; ``ServedEngine`` is what an engine provides.
- ``api_guard.py``, ``request_body.py``: access control, limits of request bodies, and their parsing.
- ``weight_files.py``: check a folder of weights before it is loaded.
- ``http_server.py``: uvicorn with time-outs and limits of connections; a server in the foreground (``serve``) or in a
  thread (``ServerThread``).
"""
