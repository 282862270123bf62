"""Built-in judges by rule: functions of a task and a response, one family per file.

- ``patterns``: ``exact_match``, ``contains``, ``matches_format``, ``within_length``, ``regex``, ``json_schema``,
  ``tags``; searches with a time limit.
- ``mathematics``: ``numeric``, ``gsm8k`` and ``math``.
- ``puzzles``: ``countdown``, arithmetic with given numbers; ``reasoning_gym``, the score of a dataset of the package
  reasoning-gym.
- ``code``: ``code``, which runs programs in ``judging.sandbox``.
- ``tool_use``: ``tool_use``; ``penalties``: ``length_penalty``, ``steps_penalty``, and ``shortest``, a judge of groups.

``judging.execution.compose.RULES`` maps names of a configuration to these functions. Read ``patterns`` first.
"""
