"""DropCompute: gradient accumulation that stops at a compute threshold."""
