"""Start a project and drive it to the end of its plan in this process, with progress on the terminal.

Used by the commands of ``cli`` and by ``tuner``. Main parts: ``begin`` checks a configuration and writes it to the
project's folder; ``drive_project`` runs the plan with the in-process driver of ``jobs``; ``round_lines`` summarises
each round from its notes.

Read in this order:
- ``preflight`` (with ``model_check``, ``prompt_lengths``, ``offline_checks``, ``machine``): every check before a run.
- ``starting``: check the configuration and write it.
- ``drive`` (with ``ledger``, the cost record): run the plan, and clean up after an interruption.
- ``live``, ``live_table``, ``console``: progress and output on the terminal.
- ``round_lines``, ``next_steps``: results per round, and what the user can do next.
"""
