"""The one command, `diloco`: one file a verb under `cli.verbs`, imports kept lazy."""
