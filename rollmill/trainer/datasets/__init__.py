"""Rows of files as token sequences on disk: where rows come from, the shards they become, and who tokenises them. Imports no torch."""
