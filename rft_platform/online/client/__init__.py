"""Use and improve a served policy from Python.

- ``openai_clients``: ``OnlineClient`` and ``AsyncOnlineClient``, the OpenAI clients with feedback and commit.
- ``feedback``: declared metrics, request bodies, and the service's answers.
- ``training_runner``: ``TrainingRunner`` repeats selected requests of a production agent with the served policy.
"""
