"""Semantic checks of a configuration, made before anything starts. Each problem is one line with its fix.

Read ``check_config`` first: it calls all other modules and raises one ``UserError``. The others take the resolved
settings or the configuration and yield problems:

- ``algorithm``, ``synchronizer``, ``sizes``, ``data``: settings that do not fit the algorithm or each other.
- ``models`` (auxiliary models, policies), ``texts`` (names and secrets).
- ``machine``: files, processors and GPUs of this machine, and the interpreter of worker processes.
"""
