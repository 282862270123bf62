"""Make attempts in worker processes, which may use the Python interpreter of another environment.

Modules that run in a worker import only the standard library and ``openai`` at module top. Read in this order:

- ``worker_executor``: ``WorkerExecutor`` lends a worker of a pool (``cluster.worker_pool``) for each attempt.
- ``worker_wire``: the values that parent and worker exchange.
- ``worker``: the functions that a worker process runs: load the workflow once, make an attempt.
- ``import_check``: checks before a run that workers can import the workflow: with their interpreter, in their
  runtime environment.
"""
