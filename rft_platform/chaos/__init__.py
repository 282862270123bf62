"""Seeded kills of a scratch project's processes, and the invariants that must hold when it has come through."""
