"""Make attempts in worker processes, which may use the Python interpreter of another environment.

Modules that run in a worker import only the standard library and ``openai`` at module top. Read in this order:

- ``worker_executor``: ``WorkerExecutor`` starts up to ``count`` workers on demand and lends one slot per attempt.
- ``worker_process``: the parent's side of one process: start, messages, kill with all descendants.
- ``worker_wire``: the JSON lines between parent and worker.
- ``worker``: the process, and the guardian that kills it when its parent ends.
- ``worker_service``: loads the workflow once and makes the attempts that the parent requests.
- ``import_check``: checks before a run that the workers' interpreter can import the workflow.
"""
