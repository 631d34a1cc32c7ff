"""Benchmarks of whole runs, beside their peers, in one command each."""
