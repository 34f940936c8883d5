"""`diloco bench`: what a synchronisation costs, stage by stage and between real processes."""
