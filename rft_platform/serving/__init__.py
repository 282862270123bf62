"""Online service: serves the policy to production clients and keeps their calls and feedback for training.

Read in this order:

- ``database``, ``migrations``: the tables, and how the database is opened.
- ``owner``: the project that a database belongs to.
- ``incoming``: calls and feedback that have just arrived, with redacted texts.
- ``traffic``: the life of a recorded call: recorded, labelled, committed, consumed.
- ``erasure``: erases old calls, and the calls of a person who asks for it.
- ``writer``: the one thread that uses the database, and what happens when the database is slow.
- ``selection``: strategies that decide which calls are recorded.
- ``gateway``: the OpenAI API in front of the engine; it records the answers.
- ``releases``: pure decisions on versions, and routing. A release is a canary release ("canary" in this folder) or an
  A/B test. ``release_store``: versions and releases in the database; ``release_decisions``: automatic decisions;
  ``release_commands``, ``release_routes``: decisions of people.
- ``preferences``, ``pages``: preferences of people, and the web pages.
- ``reports``: demonstrations and figures, computed from the tables.
- ``rules``: pure rules: the choice of a round's rows, limits of calls and callers, redaction, metrics, alerts.
- ``request_bodies``: JSON bodies of feedback and commits.
- ``app``: the HTTP API with feedback, commit, health and metrics.

``rounds.collect`` takes the committed rows into a round; ``servers.online_service`` starts the process.
"""
