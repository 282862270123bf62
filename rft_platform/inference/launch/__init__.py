"""Engines as services of a cluster.

- ``launcher``: ``EngineSpec``, ``engine_service`` and ``find_or_start_engine``, for one engine process.
- ``external``: ``external_engine``, for engines that somebody else runs.
- ``pool_start``: ``find_or_start_pool`` for all replicas of an engine; assigns GPUs.
"""
