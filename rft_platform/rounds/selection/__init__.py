"""Which tasks a round explores, and which rows a training uses.

1. ``task_selection`` (``TaskSelection``, ``SignalCount``): task batches, and their number (dynamic sampling);
2. ``row_selection`` (``select_rows``): the rows of a training, recorded before it starts; ``PendingRows``: rows that no
   training has used yet; replay of used groups.
"""
