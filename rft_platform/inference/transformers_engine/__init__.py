"""The embedded engine: a transformers model behind the OpenAI HTTP subset, in a process of its own."""
