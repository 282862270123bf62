"""Production traffic: its database, and what is decided and computed there.

- ``database``, ``migrations``: the tables, how the database is opened, and the project that it belongs to.
- ``declared_metrics``: valid values of feedback.
- ``incoming``: calls and feedback that have just arrived, with redacted texts, and what a call does.
- ``store``: the life of a recorded call: recorded, labelled, committed, consumed.
- ``labelling``: the rewards that feedback gives, by the formula ``service.train_on``.
- ``writer``: the one thread that writes to the database, and what happens when the database is slow.
- ``reader``: the threads that only read it.
- ``selection``: strategies that decide which calls are recorded.
- ``round_rows``: which committed rows a round takes, as rollout rows.
- ``project_traffic``: the database and the rules of one project.
- ``erasure``: erases old calls, and the calls of a person who asks for it.
- ``preferences``, ``demonstrations``, ``implicit_feedback``: preferences and corrections of people, and rewards by
  their next message.
- ``alerts``: figures of the newest traffic, and alerts when a limit is exceeded.
- ``browsing``: find recorded calls, and make a dataset of them.
- ``history``: success, latency, label delay and versions over time.
"""
