"""The base of the whole project: what it needs of JAX, in every package.

    compat        differences between versions of JAX
    dependencies  values that tie the schedule of a program to its data
    equations     equations of programs that JAX has traced
    own_thread    calls outside of a trace, with a limit of time
    platforms     a choice by platform, of which JAX traces what it lowers

It is private to the project: both packages import it, but for `dynamiq_research`, which takes
public names alone. Authors of extensions find the parts of it that they need in
`dynamiq_jax.parts`. It imports nothing of the project.
"""
