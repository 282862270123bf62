"""Run model-written code and long computations in separate processes with limits. This is not a security boundary.

Read in this order:

- ``run_program``: ``run_program`` and ``run_tested``, which the judge ``code`` calls, with ``Limits`` and ``Outcome``.
- ``program_rpc``: the two processes of tested code, one with the program and one with the tests, connected by pipes.
- ``bounded_call``: call one function of the platform within limits of time and memory.

``cluster.confined`` runs first in a sandboxed process: it drops the network, confines writes, sets limits and starts
the program. It and ``program_rpc`` run as files and import nothing of the platform.
"""
