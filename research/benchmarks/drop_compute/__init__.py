"""DropCompute, simulated and with two processes of which one is late.

__main__  the benchmark
host      one of the processes
run       runs of both
figure    the plot
"""
