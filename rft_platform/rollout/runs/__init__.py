"""One run (one execution of a workflow on a task) and one attempt at a run, in this process or in a worker.

Read in this order:

- ``run``: ``ExploreBatch`` and ``Run`` (what to execute), ``RunResult`` and ``rows_of_run`` (what it returns).
- ``attempt``: ``make_attempt`` calls the workflow with a recorded model and collects the result; ``AttemptStatistics``,
  ``RemoteFailure``. User code gets the arguments that it declares, and is cancelled on time-out.
"""
