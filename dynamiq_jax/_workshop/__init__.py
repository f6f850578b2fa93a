"""Measurements that commands and benchmarks share.

The library imports neither this package nor the packages that only it needs.

What is measured:

    settings          METHOD:BITS:TOPOLOGY, as the command line takes it
    gradients         made-up gradients of workers
    gradient_files    gradients of workers in files

On the devices of this process, or of several that joined each other:

    joining           processes that join each other through `jax.distributed`
    devices           devices of the workers, and their mesh
    all_reduce        one all-reduce over a mesh: compiled, run, timed, compared with the exact sum
    measure           time, bytes and error of several settings, measured in turns
    break_even        speeds of a link below which one setting beats another

Between emulated hosts on slow links:

    namespaces        emulated hosts
    processes         processes that are started, asked, watched and ended together
    python_processes  command line and environment of such processes
    signals           signals that ask a command to end
    hosts             one process for each emulated host, joined to the others
    host              the process of one emulated host
    measuring_host    such a process that measures an all-reduce
    network           time, bytes and error of several settings between emulated hosts

Without communication:

    simulate          all workers on virtual devices of this machine
    comparison        error, bytes and time of one setting on given gradients
    advice            predicted times of a training step, and what follows from them
    error_law         growth of the error with the workers

Of a training step that a user gives:

    bucket_sizes      steps with buckets of some size

Around a measurement:

    options           checks of options that several commands have
    units             sizes and rates as people write them
    machine           model and cores of this machine
    environment       hardware, versions and date of a result
    records           results in JSON files
    tables            progress and tables on a terminal
    plots             plots of results
    errors            errors that a command shows without a traceback
"""
