"""The rules of a run as pure functions: clock, ask, close, merge, step."""
