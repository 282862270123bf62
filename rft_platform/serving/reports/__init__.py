"""Data that is computed from the tables of production traffic.

- ``demonstrations``: corrections of users as demonstrations for training.
- ``reactions``: answers to which the user has reacted.
- ``traffic_figures``: actions, rewards and delays of the newest traffic.
"""
