"""The outer server: owner of the global parameters and the outer optimizer. No gRPC."""
