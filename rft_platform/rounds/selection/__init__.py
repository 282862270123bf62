"""Which tasks a round explores, and which rows a training uses.

1. ``task_selection`` (``TaskSelection``, ``SignalCount``): task batches, and their number (dynamic sampling);
2. ``stored_rollouts``: rollouts that an interrupted exploration has stored already;
3. ``pending_rows`` (``PendingRows``): rows that are explored and judged, but not used by a training yet;
4. ``training_groups`` (``Group``): groups as units of training, and replay of used groups;
5. ``row_selection`` (``select_rows``): the rows of a training, recorded before it starts;
6. ``production_rows``, ``production_demonstrations``: rows and demonstrations of online projects, from their database.
"""
