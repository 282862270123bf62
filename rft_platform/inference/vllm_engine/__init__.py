"""vLLM behind the engine interface: its own OpenAI server, with the control plane added to its process."""
