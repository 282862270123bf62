"""Find running engine processes by their leases, or start them.

- ``launcher``: ``EngineSpec`` and ``find_or_start_engine``, for one engine process.
- ``pool_start``: ``find_or_start_pool`` for all replicas of an engine; ends surplus replicas, assigns GPUs.
"""
