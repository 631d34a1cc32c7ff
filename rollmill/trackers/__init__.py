"""Copies a run's metrics files into people's trackers; nothing here is in the path of training, and no tracker is needed for it."""
