"""Parts of the benchmark of the GPU kernels, from the bottom up; none imports one further down.

    options      what is measured, and for how long
    record       sections with their results and errors, the time left, the JSON file
    timing       the time of one of many calls that follow each other
    bench        what sections share: options, record, compiled programs, rows
    gradients    gradients like a model's, and the error of an estimate
    baselines    the codecs that a user would write in plain jnp
    operations   what is timed: the kernels of every backend, and the baselines
    traffic      bytes that an operation has to move
    cases        a bucket at some size, dtype and bits: programs and inputs of all operations
    rows, table  a timed operation as a row of the results, and as a line on the terminal
    plot         the figure

The sections, in the order in which they run: `device`, `correctness`, `speed` (main, bits, sizes),
`prediction`, `sweep`, `all_reduce` and `profiling`. Each is a function of the bench and of a dict
that it adds its results to as it goes; what sections hand on to later ones is in the bench.
"""
