"""Task selectors: functions that choose the tasks of an explore batch from seed, step and earlier outcomes.

Read ``selector_registry`` first (``Moment``, ``Chosen``, ``select`` and the decorator ``selector``), then
``pass_history`` (``History`` and ``Outcomes``: how often each task was run and solved). The selectors are
``sequential`` (``sequential``, ``shuffle``), ``random``, ``easy_to_hard`` and ``difficulty_based``. A selector is
deterministic: a repeated round takes the same tasks.
"""
