"""The dialects of OpenAI's API: what the recorder, the gateways and both engines read, check and write.

Read in this order:

- ``schema``: bodies of requests, the bounds of their fields, and an OpenAPI document of them.
- ``messages``: conversations and prompts in the forms that clients send.
- ``templates``, ``tokenizer``: from conversations to prompt ids.
- ``parsers``, ``answers``: from sampled ids to the text, reasoning and tool calls of an answer, whole or as chunks.
- ``calls``, ``responses``: the calls that are recorded: request and answer in the forms of caller and engine.
- ``streams``: server-sent events.
- ``errors``: errors in OpenAI's form, and how a too long prompt is recognised.
"""
