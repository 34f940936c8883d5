"""Many islands on a virtual clock, in one process and without a socket.

The scheduler, merge, codec and learner's island are those of production; time, lines and deaths are
modelled. `run.simulate` is one run, `study` a matrix of them.
"""
