"""Every call kept off the hot path, and episodes rebuilt from what was kept."""
