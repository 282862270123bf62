"""Start, supervise and end the servers and long-lived processes of a project.

Read in this order:

- ``interface.py``: ``ui_servers``, the servers of ``rft ui`` and their readiness checks; ``start_sensors``.
- ``supervise.py``: ``Server``, ``serving`` and ``wait_for_end``: start, restart and stop servers together.
- ``dagster_server.py``, ``mlflow_server.py``: Dagster's webserver and MLflow behind the web guard.
- ``leases.py``: find and end the processes that hold leases (engines, trainer).
"""
