"""Helpers of the tests.

gradients            gradients that look like gradients, and the error of an estimate
workers              a function on simulated workers and on a mesh
speed                all that makes the tests fast, and what it gains
covering             the test files of a module, for tests.mutants
hlo                  collectives of compiled programs
oracle               the wire format in NumPy; blocks_oracle for block formats
commands             `dynamiq-jax` in a process of its own
processes            scripts that join each other: multiprocess_worker, recovery_worker
emulation            whether hosts can be emulated here
llm_*                models, files, tokenizers and templates for the fine-tuning example
"""
