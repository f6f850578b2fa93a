"""The base of the whole project: what it needs of JAX, in every package.

It is private to the project: both packages import it, but for `dynamiq_research`, which takes
public names alone. Authors of extensions find the parts of it that they need in
`dynamiq_jax.parts`. It imports nothing of the project.
"""
