"""Built-in judges by rule: functions of a task and a response, one family per file.

- ``matching``: ``exact_match``, ``contains``, ``matches_format``, ``within_length``.
- ``numbers``: ``numeric``, ``gsm8k``; ``mathematics``: ``math``; ``notation``: one spelling of numbers for both.
- ``patterns``: ``regex``, ``json_schema``, ``tags``.
- ``code``: ``code``, which runs programs in ``judging.sandbox``.
- ``tools``: ``tool_use``; ``penalties``: ``length_penalty``, ``steps_penalty``.
- ``ranks``: ``shortest``, a judge of groups.

``judging.registry.RULES`` maps names of a configuration to these functions. Read ``matching`` first.
"""
