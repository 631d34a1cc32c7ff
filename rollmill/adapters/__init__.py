"""Engines that Rollmill did not write, behind the same protocol as its own; knows no trainer, ledger or task."""
