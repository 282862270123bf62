"""Several engine processes that serve the same weights, used as one ``PolicyEngine``.

Read in this order:

- ``engine_pool``: ``EnginePool``, which combines the parts below.
- ``replicas``: ``Replica`` and ``Replicas``, the table of active replicas and their load.
- ``batch_dispatch``, ``partition``: split a batch by load, run the parts concurrently, repeat failed parts.
- ``broadcast``: call all replicas; distinguish a refusal from a lost replica.
- ``weights``: the common weights, and loading them into a replica that returns.
- ``replica_restart``: restart a lost replica while the others keep serving.
"""
