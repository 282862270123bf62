"""Judging stored rollouts: judge functions, the rules that come with the platform, composition, versions."""
