"""The phases of a round as plain functions, and the plan that decides which one runs next. Independent of Dagster.

``observe`` reads a project's state and ``plan_next`` decides on it. Each phase (``explore``, ``judge``, ``train``,
``evaluate_round``) writes a note to its round when it is complete.

Read in this order:
- Phases: ``round``, ``warm_start``, ``explore``, ``judge``, ``train``, ``register``, ``evaluate``, ``measure``.
- State and plan: ``project``, ``notes``, ``state``, ``observe``, ``plan``, ``dynamic``.
- Policies and code version: ``policy``, ``mend``, ``provenance``.
- Settings turned into parts: ``algorithm``, ``workflows``, ``demonstrations``.
- Selection of tasks and rows: ``task_selection``, ``stored_rollouts``, ``landing``, ``replay``, ``row_selection``.
- Reports: ``curve``, ``champion``, ``bench``, ``monitor``.
- Offline training: ``offline``, ``offline_data``.
- Services: ``processes``, ``auxiliary``, ``model_versions``, ``rebuild_registry``.
- Maintenance: ``verification``, ``maintenance``, ``thinning``, ``moved_home``.
"""
