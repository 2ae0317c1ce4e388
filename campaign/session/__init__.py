"""What runs on the node: cell runner, anchors, telemetry."""
