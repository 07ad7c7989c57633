"""What tests share: stand-ins, helpers that make engines, and programs that are started by jobs."""
