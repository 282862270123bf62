"""The phases of a round as plain functions, and the plan that decides which one runs next. Independent of Dagster.

``observe`` reads a project's state and ``plan_next`` decides on it. Each phase (``explore``, ``judge``, ``train``,
``evaluate_round``) writes a note to its round when it is complete.

Read in this order:
- State and plan: ``project``, ``state``, ``observe``, ``plan``, ``dynamic``.
- Policies and code version: ``policy``, ``snapshots``, ``policies``, ``warm_start``, ``provenance``.
- Exploration: ``explore``, ``workflows``, ``task_selection``, ``dynamic_sampling``, ``stored_rollouts``.
- Judgement: ``judge``, ``judgements``, ``operators``.
- Training: ``train``, ``run_training``, ``algorithm``, ``landing``, ``groups``, ``row_selection``, ``replay``.
- Evaluation: ``evaluate``, ``measure``, ``measurement``, ``champion``, ``curve``, ``bench``, ``time_split``.
- Offline training: ``offline``, ``offline_*``, ``demonstrations``.
- Services: ``processes``, ``auxiliary``, ``register``, ``model_versions``, ``rebuild_registry``, ``monitor``.
- Maintenance: ``mend``, ``verification``, ``maintenance``, ``thinning``, ``moved_home``.
"""
