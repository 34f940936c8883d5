"""Everything that crosses the network: servicers, typed client, translation, health.

Only `services.translate` knows both protobuf and the project's own records, only
`services.errors` both gRPC status codes and the project's own errors. Nothing here imports jax.
"""
