"""A small language model to measure with: its text, its network, its training, its gradients."""
