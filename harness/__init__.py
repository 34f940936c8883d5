"""Many islands for real, on one machine: processes, their supervision, views, benches."""
