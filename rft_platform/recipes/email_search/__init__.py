"""A tiny agent is to find messages in a mailbox: the right tool, the right arguments, no invalid call.

``rft recipe`` does not offer it yet, because the agent seldom finds the id of a message.

Read in this order:

- ``mailbox``: ``Mailbox``: more than 2,000 generated messages in an SQLite database with full-text search.
- ``questions``: ``Question`` and ``split_questions()``: questions about one message; threads and wordings are held out.
- ``workflow``: ``EmailSearch``: the tools ``search`` and ``read``, and the reward of each call.
- ``demonstrations``: ``demonstrate()``: conversations of a careless teacher for the warm start.
- ``corrections``: ``corrections()``: preference pairs from the teacher's errors, for DPO.
- ``prepare``: ``prepare()`` writes everything into one folder.
"""
