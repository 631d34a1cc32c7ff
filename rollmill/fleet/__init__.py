"""Running roles: the run directory, role processes, and the supervisor of one machine."""
