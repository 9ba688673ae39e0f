"""What processes write about themselves: logs in one file a process, and traces for an OpenTelemetry collector."""
