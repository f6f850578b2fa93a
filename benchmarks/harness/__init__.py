"""Parts that all benchmarks share.

`command` and `columns` need the extra `bench`. The others import only what the library needs, since
some benchmarks run on machines that have no more.

command           program of a benchmark: options, tables, result file and figure
columns           tables of rows by columns
files             result files, with the environment and the options
timing            medians of repeated calls, and of calls in turns
batches           times of calls in batches, and of a copy of memory
operations        operations of the codec that are timed, and the bytes that each has to move
device_gradients  made-up gradients of any size on a device
signals           signals that ask a benchmark to end
processes         calls in a process of their own
"""
