"""The configuration: its schema, loading, semantic checks, derived plan, and where a project keeps its state."""
