"""YAML presets, one file per model; every file names its source."""
