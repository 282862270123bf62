"""The record of what the policy did: rows, their Parquet store, queries over it and checks of it."""
