"""Error of methods: on the same gradients, by workers, by bits, by kind of tensor."""
