"""Parts that all benchmarks share.

`command` and `columns` need the extra `bench`. The others import only what the library needs, since
some benchmarks run on machines that have no more.

command    program of a benchmark: options, tables, result file and figure
columns    tables of rows by columns
files      result files, with the environment and the options
timing     medians of repeated calls, and of calls in turns
processes  calls in a process of their own
"""
