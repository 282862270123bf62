"""Data that is computed from the tables of production traffic.

- ``demonstrations``: corrections of users as demonstrations for training.
- ``reactions``: answers, each with the next message of the user.
- ``user_feedback``: the feedback on given calls.
- ``traffic_figures``: actions, rewards and delays of the newest traffic.
"""
