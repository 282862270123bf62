"""Configuration files of Trinity-RFT: what their keys and names mean here.

A key of such a file that the schema does not have is renamed, or accepted with one line that says what takes its place,
or refused with the reason. ``load`` applies this to a user's file after interpolation and before validation.

Read in this order:

- ``keys``: THE table, key by key; ``treatments``: what a row of the table does.
- ``names``: workflows, rewards, algorithms and their arguments by name.
- ``tasksets``, ``algorithms``, ``stages``: conversions of several keys at once.
- ``convert``: ``convert``, which applies all of them.
"""
