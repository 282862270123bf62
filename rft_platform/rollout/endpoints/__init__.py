"""The OpenAI endpoints whose calls are recorded.

An ``Endpoint`` converts the caller's request to the engine's request, extracts the sampled tokens from the answer, and
converts the answer to the form that the caller requested. ``rollout.recording.recorder`` uses these classes; they do no
I/O.

Read in this order:

- ``endpoint``: the interface: ``Endpoint``, ``StreamedAnswer``, ``SampledChoice``, ``CallDefaults``.
- ``chat``, ``completions``: ``ChatCall`` for ``/v1/chat/completions``, ``CompletionCall`` for ``/v1/completions``.
- ``responses``: ``ResponsesCall`` for ``/v1/responses``, translated to a chat call by ``responses_input``,
  ``responses_answer`` and ``responses_events``.
- ``events``: parsing and writing of server-sent events.
"""
