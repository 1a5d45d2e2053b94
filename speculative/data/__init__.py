"""Data: tasks, batches and metrics; `offline`, `vocabulary`, `metrics` need no TensorFlow."""
