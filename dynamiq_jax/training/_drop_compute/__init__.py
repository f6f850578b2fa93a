"""DropCompute: gradient accumulation that stops at a compute threshold.

step          the train step, and its state
accumulation  loops over micro-batches, each of one worker and until the threshold
workers       groups of devices with a loop of their own
calibration   recorded latencies, and a threshold that all workers choose together
model         effect of a threshold on given latencies
law           the same for latencies of a distribution
"""
