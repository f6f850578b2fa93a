"""Training on emulated hosts against the clock: parts of `benchmarks.training.time_to_accuracy`.

host     the process of one emulated host
run      runs on all hosts, with their times, losses and checksums
rounds   settings: an all-reduce in every step, or local SGD
target   the loss that runs have to reach, and when they do
report   record, tables and plot of runs
"""
