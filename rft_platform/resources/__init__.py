"""Dagster resources, which the assets use to reach the project and its processes.

Read in this order:

- ``project.py``: ``ProjectResource``, the project's folder; the other resources depend on it.
- ``engine.py``, ``trainer.py``: ``EngineResource`` and ``TrainerResource``, found by their leases or started.
- ``registry.py``: ``RegistryResource``, the MLflow registry.
"""
