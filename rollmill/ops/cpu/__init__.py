"""The exact profile on CPUs; `kernels` and `pages` need numba and are imported when the first attention runs."""
