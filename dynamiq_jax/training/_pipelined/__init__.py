"""The pipelined train step: a mean in two halves, each under computation."""
