"""Parts of the benchmark of the GPU kernels, from the bottom up; none imports one further down.

    options      options of the benchmark
    record       sections with their results and errors, the time left, the JSON file
    bench        programs, compiled and timed, that sections share
    jobs         the operations that are timed: kernels of every backend, and plain codecs
    cases        a bucket of some size, dtype and bits: programs and inputs of all jobs
    report       timed operations as rows of the results and on the terminal
    device       sections `device` and `prediction`: copy bandwidth, and what follows from it
    correctness  sections `correctness` and `all_reduce`: results of every backend
    speed        sections `main`, `bits`, `sizes` and `sweep`: times of every operation
    profiling    section `profiler`: kernels of single calls, without the host

kernels      the benchmark itself
h200_model   compilation for an H200 without one, for `benchmarks.aot`

A section is a function of the bench and of a dict to which it adds its results as it goes; what it
hands on to later sections is in the bench. `benchmarks.gpu.kernels` runs them.
"""
