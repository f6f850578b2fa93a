"""Training of two processes, one of which is late: the parts of `benchmarks.training.drop_compute`.

host    one of the processes
run     runs of both
figure  the plot
"""
