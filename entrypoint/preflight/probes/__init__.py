"""Programs that run in processes of their own; the last line of what they print is JSON."""
