"""A study: a matrix of simulated runs and seeds, its cells on disk, and the tables made of them."""
