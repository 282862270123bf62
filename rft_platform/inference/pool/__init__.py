"""Several engine processes that serve the same weights, used as one ``PolicyEngine``.

Read in this order:

- ``engine_pool``: ``EnginePool``, which combines the parts below and restarts a lost replica while the others serve.
- ``replicas``: ``Replica`` and ``Replicas``, the table of active replicas and their load; how a batch is split by load.
- ``batch_dispatch``: run the parts of a batch concurrently, repeat failed parts.
- ``broadcast``: call all replicas; distinguish a refusal from a lost replica.
- ``weights``: the common weights, and loading them into a replica that returns.
"""
