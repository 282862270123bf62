"""Import traces of other tools: their conversations become tasks, demonstrations and preference pairs.

Read in this order:

- ``readers``: ``Trace``, one type for the traces of all tools, and one reader a format.
- ``datasets``: the rows that are made of traces; ``origins``: which traces a stored row was made of.
- ``imports``: the folder of a home with the datasets of each import; ``received``: spans that ``rft receive`` got.
"""
