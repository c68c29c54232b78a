"""The command bench: its settings, check points, dry run and batch sizes."""
