"""The trainer workshop: advantages, losses, packing, the optimiser step, checkpoints and the supervised stages."""
