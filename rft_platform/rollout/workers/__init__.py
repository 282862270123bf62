"""Make attempts in worker processes, also under the interpreter of another environment.

The worker's side imports only the standard library and ``openai`` at module top. Read in this order:

- ``worker_executor``: ``WorkerExecutor`` starts up to ``count`` workers on demand and lends one slot per attempt.
- ``worker_process``: the parent's side of one process: start, messages, kill with all descendants.
- ``worker_wire``: the JSON lines between parent and worker.
- ``worker``: the process, and the guardian that kills it when its parent ends.
- ``worker_service``: loads the workflow once and makes the attempts that the parent requests.
- ``import_check``: before a run, whether the workers' interpreter can import the workflow.
"""
