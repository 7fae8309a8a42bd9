"""The recipe of the reference model, from text to checkpoint: `corpus`, then `train`, which calls `export`."""
