"""Chaos: processes of a real run are killed, stopped and kept away, and the run is judged after."""
