"""Decide what runs next. ``plan_next`` is a pure function; sensors and the in-process driver execute its decisions.

1. ``plan`` (``plan_next``; its input ``ProjectState``, its output ``Plan`` of ``Action``): warm start, exploration and
   sync of each round, retries; the dynamic sync styles, in which a training takes any rows that wait;
2. ``project_state`` (``observe``): build the state from the notes and the orchestrator's record of its launches.
"""
