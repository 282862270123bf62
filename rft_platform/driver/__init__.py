"""Start a project and drive it to the end of its plan in this process, with progress on the terminal.

Used by the commands of ``cli`` and by ``tuner``; the Dagster part of the driver is in ``jobs``. Read in this order:
1. ``preflight`` (with ``model_check``, ``prompt_lengths``, ``offline_checks``, ``service_checks``, ``machine``): every
   check before a run;
2. ``start`` (``begin``): check the configuration and write it to the project's folder;
3. ``run`` (``drive_project``) and ``run_cost``: run the plan, clean up after an interruption, record the cost;
4. ``live``, ``live_table``, ``console``: progress and output on the terminal;
5. ``round_lines``, ``next_steps``: results of each round, and what the user can do next.

``debug`` runs one task without a project.
"""
