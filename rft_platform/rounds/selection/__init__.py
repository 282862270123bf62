"""Which tasks a round explores, and which rows a training uses.

1. ``task_selection`` (``TaskSelection``, ``SignalCount``): task batches, and their number (dynamic sampling);
2. ``pending_rows`` (``PendingRows``): rows that are explored and judged, but not used by a training yet;
3. ``training_groups`` (``Group``): groups as units of training, and replay of used groups;
4. ``row_selection`` (``select_rows``): the rows of a training, recorded before it starts.
"""
