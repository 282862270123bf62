"""Start a project and drive it to the end of its plan in this process, with progress on the terminal.

Used by the commands of ``cli`` and by ``tuner``. Read in this order:
1. ``checks``: lists all checks, and makes a refusal, the dry run's plan or the output of ``rft doctor`` of what they
   find. The checks are in ``project_checks`` (folder, models, services), ``data_checks`` (tasks, datasets, user code),
   ``model_check`` (the trainer accepts the model), ``cluster_checks`` (Ray), ``machine`` (the installation) and, for
   the settings, ``config.checks``;
2. ``start``: ``begin`` checks the configuration and writes it to the project's folder; ``drive_project`` runs the plan
   and cleans up after an interruption;
3. ``driver``: launches what the plan returns, on the Dagster instance; ``run_cost`` records what that cost;
4. ``live``, ``console``: progress and output on the terminal;
5. ``round_lines``, ``next_steps``: results of each round, and what the user can do next.

``debug`` runs one task without a project.
"""
