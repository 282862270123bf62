"""One run (one execution of a workflow on a task) and one attempt at a run, in this process or in a worker.

Read in this order:

- ``run``: ``ExploreBatch`` and ``Run`` (what to execute), ``RunResult`` and ``rows_of_run`` (what it returns).
- ``attempt``: ``make_attempt`` calls the workflow with a recorded model and collects the result; ``Connection``,
  ``RemoteFailure``.
- ``invoke_workflow``: call user code with the arguments that it declares, and cancel it on time-out.
"""
