"""Server parts that both engines share; the recording gateway uses some of them too.

Read in this order:

- ``openai_schema.py``: bodies of the OpenAI API and the bounds of their fields.
- ``control_api.py``: the ``/engine/*`` routes of the control plane; ``ServedEngine`` is what an engine provides.
- ``api_guard.py``, ``request_body.py``: access control and limits of request bodies.
- ``api_errors.py``, ``context_limit.py``: errors in OpenAI's form, and the refusal of long prompts.
- ``chat_template.py``, ``template_process.py``, ``tokenizer.py``: conversations to prompt ids.
- ``weight_files.py``: check a folder of weights before it is loaded.
- ``http_server.py``: time-outs of connections.
"""
