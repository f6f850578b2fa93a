"""Measurements that commands and benchmarks share. The library never imports this package, nor the
packages that only it needs.

    settings        METHOD:BITS:TOPOLOGY, as the command line takes it
    measure         time, bytes and error of an all-reduce on the devices that are there
    simulate        all workers as rows of a batch on one device
    gradients       made-up gradients of workers
    gradient_files  gradients of workers in files
    namespaces      emulated hosts on slow links
    processes       one process for each host, started, watched and ended together
    worker          the program of such a process
    joining         processes that join through `jax.distributed`
    error_law       growth of the error with the workers
    environment     hardware, versions and date of a result
    machine         model and cores of this machine
    tables          progress, tables, JSON records and plots
    units           sizes and rates as people write them
    errors          errors that a command shows without a traceback
"""
