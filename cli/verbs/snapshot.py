"""`diloco snapshot`: what `diloco admin snapshot` does, under the name that comes to mind."""

from __future__ import annotations

from dataclasses import replace

from cli.verbs import admin_snapshot

VERB = replace(admin_snapshot.VERB, name="snapshot")
