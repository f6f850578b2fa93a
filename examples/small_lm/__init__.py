"""A small language model to fine-tune: its text, its network, its training and its report."""
