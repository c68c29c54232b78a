"""What comes out: acceptance here and in an engine, the report, tracking."""
