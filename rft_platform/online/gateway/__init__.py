"""The HTTP API of the online service.

- ``limits``: how many choices and tokens a call, and how many requests a caller may ask for.
- ``proxy``: the OpenAI API in front of the engine; it records the answers.
- ``request_bodies``: JSON bodies of feedback and commits. ``release_routes``: decisions on versions.
- ``app``: all routes, with feedback, commit, health and metrics.
"""
