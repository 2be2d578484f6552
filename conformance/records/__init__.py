"""Records, baselines and journals of runs as files, and the schema of their JSON."""
