"""The nouns that learners and the outer server share: layout, quantizer, payload, chunks, digest.

No gRPC and no I/O in here. Import the modules by name: only `fragments.tree`,
`fragments.quantize` and `fragments.digest` import jax.
"""
