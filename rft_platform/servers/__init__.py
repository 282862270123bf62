"""The servers of a project's commands: what they are and how they are known to be ready.

Each is declared as a ``Service``; ``cluster.local.supervisor`` keeps them running. Read in this order:

- ``ui_servers``: the servers of ``rft ui`` and ``rft serve``, their readiness checks, and ``start_sensors``.
- ``ports``: refuse taken ports before anything starts.
- ``dagster_server``, ``mlflow_server``: Dagster's webserver and MLflow behind the web guard.
- ``online_service``: the process of the online service, which ``rft serve`` starts.
- ``viewer``: the pages of ``rft view`` over the experience store.
- ``metrics``: Prometheus metrics of a project. ``span_receiver``: the OTLP receiver of ``rft receive``.
- ``next_launches``: what a project launches next, in words.
"""
