"""Programs compiled for hardware that is not there.

h200            the benchmark for H200
tpu             the benchmark for TPUs
global_step     the benchmark for a global step, on hosts of H200 and slices of TPUs
kernels         registers, spills, bytes and instructions of every GPU kernel
pmean           a compressed `pmean` alone, for several GPUs
training_step   a data-parallel training step, for several GPUs
transfers       collectives of a scheduled program, and what runs meanwhile
tpu_kernels     kernels for TPUs, each compiled on its own
tpu_programs    programs for TPUs, and the costs of their instructions
tpu_schedule    schedules of kernels for TPUs, as the compiler writes them
"""
