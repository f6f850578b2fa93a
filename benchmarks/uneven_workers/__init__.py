"""Training of two processes, one of which is late: the parts of `benchmarks.drop_compute`.

host    one of the processes
run     runs of both
figure  the plot
"""
