"""Many islands on a virtual clock, in one process and without a socket.

Nothing is here yet. The room exists so that the layers hold its first module to its place: above
learner and outer_server, whose own code it will run, and beside services.
"""
