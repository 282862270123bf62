"""Decide what runs next. ``plan_next`` is a pure function; sensors and the in-process driver execute its decisions.

1. ``state`` (``ProjectState``, ``Action``, ``Plan``): input and output;
2. ``plan`` (``plan_next``): warm start, exploration and sync of each round, retries;
3. ``dynamic_sync``: the dynamic sync styles, in which a training takes any rows that wait;
4. ``project_state`` (``observe``): build the state from the notes and the orchestrator's record of its launches.
"""
