"""Run processes: children of this process that answer calls, and programs. Only the standard library is imported.

- ``child``: ``Child``, a process that calls functions of one module within limits; ``run_command``, for any program.
- ``child_main``: the process of a ``Child``.
- ``confined``: limits of a process and its end with its parent; as a program, it runs another one without a network.
"""
