"""Models of experiments.yaml, the strict loader, the JSON Schema. Pure."""
