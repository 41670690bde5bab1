"""Models of others in and out: weights.py, and export.py for transformers; warm_start.py goes on from one."""
